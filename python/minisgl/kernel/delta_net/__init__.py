"""Recurrent layers: Gated DeltaNet.

`recurrent_rows` lays out the rows of a step. `delta_rule` computes them in torch; on a GPU `cuda_step` computes the
rows of one token, `cuda_chunks` longer ones.
"""

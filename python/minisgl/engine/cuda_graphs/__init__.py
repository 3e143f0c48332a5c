"""CUDA graphs of steps: `graphs` captures and replays decodes and small prefills, for the sizes of `sizes`.

Two trials at the start decide which graphs there are: `capture_trial` compares those of a model of transformers with
launches operation by operation, and `launch_trial` measures up to how many tokens the graph of a prefill pays.
"""

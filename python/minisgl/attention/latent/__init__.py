"""Latent attention (MLA) on the kernels of csrc/.

`backend` is its attention backend. `decode` attends to the latents themselves, query by query. `prefill` expands keys
and values of long chunks; `key_blocks` says which ones at a time.
"""

"""Attention over the paged KV pool.

`base` declares what a backend is. `backends/` has one module for each, `latent/` the one for latent attention (MLA).
`backend_choice` chooses among them by layer, after their `self_test`; `model_attention` plans the step of all layers.
`fused` is the decode in one launch, split as `decode_splits` says.
"""

"""Sampling of tokens from a step's logits, and their log-probabilities.

`sampler` has the interface and the sampler in torch, which is the reference; `cuda_sampler` is the one for GPUs. Before
either draws, `logits_processing` applies biases and penalties and excludes forbidden ids. `sharded_logits` leaves each
rank its shard of the logits.
"""

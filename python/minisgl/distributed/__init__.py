"""Tensor parallelism: the group of ranks that share one model."""

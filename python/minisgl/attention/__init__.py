"""Attention over the paged KV pool: the interface, and one module for each backend."""

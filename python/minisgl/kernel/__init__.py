"""Fused operations: the interface, the torch reference, and the CUDA kernels of csrc/."""

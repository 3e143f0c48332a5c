"""Compilation and launches of the CUDA kernels of csrc/.

`compile` compiles them with NVRTC, and needs cuda-core. `signature` makes a typed launcher from a kernel's declaration,
and needs no GPU.
"""

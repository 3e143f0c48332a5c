"""Sums and gathers over several GPUs that read or write the peers' memory.

`symmetric_memory` allocates that memory and tests it; `all_reduce` launches the kernels.
"""

"""Sums and gathers over several GPUs that read or write the peers' memory.

`symmetric_memory` allocates that memory and tests it. `all_reduce` launches the kernels of most steps, `long_sums` the
one of large prefills.
"""

"""Attention backends, one module each: `torch_backend`, the reference, `cpu_backend`, `varlen`, `fa` and `fi`.

`page_kernels` prepares what `fa` and `fi` cannot read in the page table or the pool. `cuda_home` finds the toolkit that
`fi` compiles with.
"""

"""Tensor-parallel groups. Layers call `group.TPGroup`.

Its implementations are one rank (`SingleRank`), ranks on GPUs with NCCL and our own kernels (`nccl`), and processes on
CPUs with shared memory (`shared_memory`).
"""

from minisgl.distributed.group import SingleRank, TPGroup

__all__ = ["SingleRank", "TPGroup"]

"""Ranks that hold one model together: `group.TPGroup` is what layers see, over no peers (`SingleRank`), NCCL and our
own kernels (`nccl`), or memory that the processes of a host share (`shared_memory`).
"""

from minisgl.distributed.group import SingleRank, TPGroup

__all__ = ["SingleRank", "TPGroup"]

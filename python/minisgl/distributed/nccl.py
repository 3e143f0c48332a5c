"""Ranks on GPUs of one host: NCCL, and kernels of csrc/ that are faster for small tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.distributed.group import SharedRows, Summed, TPGroup, meet, side_by_side
from minisgl.kernel.availability import kernels_missing
from minisgl.kernel.base import Norm

if TYPE_CHECKING:
    from minisgl.kernel.collectives.all_reduce import PushAllReduce
    from minisgl.kernel.collectives.long_sums import LongSums

# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclTP(TPGroup):
    """The default group of torch.distributed. `push` computes the collectives that it supports, NCCL the rest."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, push: PushAllReduce | None = None) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._device = device
        self._group = group
        self._push = push
        self._long_sums: LongSums | None = None
        self._aborting = threading.Lock()
        self._aborted = False

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        size: int,
        init_method: str,
        device: torch.device,
        timeout_s: float = 300.0,
        check: Callable[[], None] = lambda: None,
        push: bool = True,
    ) -> NcclTP:
        """Return the group once all ranks have come (see `meet`). Without `push` NCCL computes all collectives."""
        store = meet(rank, size, init_method, timeout_s, check)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
        assert dist.group.WORLD is not None
        joined = cls(dist.group.WORLD, device)
        try:
            if push and joined.smallest(kernels_missing(device) is None):
                from minisgl.kernel.collectives.all_reduce import connect_push

                joined._push = connect_push(dist.group.WORLD, device, joined.smallest, timeout_s)
        except BaseException:  # such as Ctrl-C: the caller has no group to close, and a process has only one
            joined.close()
            raise
        return joined

    @property
    def pushes(self) -> bool:
        """True if our own kernels are used for small tensors."""
        return self._push is not None

    def check(self) -> None:
        if self._aborted:  # results since then may lack a rank's part
            raise RuntimeError("the collectives were ended")
        if self._push is not None:
            self._push.check()

    def abort(self) -> None:
        # Two aborts of a NCCL communicator at a time, or one and its destruction, can wait for each other for ever.
        with self._aborting:
            if self._aborted:
                return
            self._aborted = True
            if self._push is not None:
                self._push.abort()
            self._group.abort()  # waits until CUDA graphs with its collectives are freed

    def close(self) -> None:
        self.abort()  # otherwise `destroy_process_group` waits until every rank calls it
        self._push = self._long_sums = None
        dist.destroy_process_group(self._group)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._push is not None and self._push.supports(x):
            return self._push(x, residual)
        dist.all_reduce(x, group=self._group)
        return x if residual is None else x.add_(residual)

    def enable_sequence_parallel(self, tokens: int, width: int, dtype: torch.dtype) -> bool:
        if self._push is not None:
            self._long_sums = self._push.long_sums(self._group, tokens, width, dtype)
            self.smallest(1)  # all ranks have cleared their flags
        return self._long_sums is not None

    def part_like(self, residual: Tensor) -> Tensor | None:
        return None if self._long_sums is None else self._long_sums.part_like(residual)

    def all_reduce_norm(self, x: Tensor, residual: Tensor, norm: Norm | None) -> Summed:
        if self._long_sums is not None and (part := self._long_sums.part_like(residual)) is not None:
            if x.data_ptr() != part.data_ptr():
                part.copy_(x)
            return self._long_sums.add(part, residual, norm)
        if norm is not None and self._push is not None and self._push.norms(x):
            return self._push.sum_and_norm(x, residual, norm)
        return self.all_reduce(x, residual), None

    def product_sum(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm | None) -> Summed | None:
        if self._push is None or not self._push.multiplies(x, weight, residual):
            return None
        return self._push.product_sum(x, weight, residual, norm)

    def all_gather(self, x: Tensor, width: int | None = None, out: Tensor | None = None) -> Tensor:
        if self._push is not None and self._push.gathers(x, width):
            return self._push.gather(x, width, out)
        flat = x.new_empty(self.size * x.numel())
        _all_gather(flat, x.flatten(), group=self._group)
        return side_by_side(flat.view(self.size, *x.shape), width, out)

    def share_rows(self, rows: int, width: int, dtype: torch.dtype) -> SharedRows | None:
        return None if self._push is None else self._push.share_rows(self._group, rows, width, dtype)

    def smallest(self, value: int) -> int:
        tensor = torch.tensor([int(value)], device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor.item())

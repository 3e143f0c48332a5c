"""Ranks on GPUs of one host, over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.distributed.group import meet

# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclTP:
    """This process's default group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._device = device
        self._group = group
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
    ) -> NcclTP:
        """Meet the other ranks, as `meet` does."""
        store = meet(rank, size, init_method, timeout_s, check)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
        assert dist.group.WORLD is not None
        return cls(dist.group.WORLD, device)

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._group.abort()

    def close(self) -> None:
        self.abort()  # destroying alone waits until every rank does it
        dist.destroy_process_group(self._group)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.new_empty(self.size * x.numel())
        _all_gather(flat, x.flatten(), group=self._group)
        return flat.view(self.size, *x.shape).movedim(0, -2).reshape(*x.shape[:-1], self.size * x.shape[-1])

    def smallest(self, value: int) -> int:
        tensor = torch.tensor([value], device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor.item())

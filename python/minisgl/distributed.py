"""The two collectives that the layers use, over no peers, gloo or NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_POLL = 0.02  # seconds between looks at who has come


class TPGroup(Protocol):
    """Ranks that hold one model together. Every rank calls the same collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; may overwrite x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., size * n]: the ranks' tensors side by side in rank order."""
        ...

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values; waits for all of them."""
        ...

    def abort(self) -> None:
        """End the collectives that wait for a rank which is gone; from any thread. None can be called afterwards."""
        ...

    def close(self) -> None:
        """Leave the group, whatever the other ranks do. CUDA graphs that have its collectives must be gone."""
        ...


class SingleRank:
    """The group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def smallest(self, value: int) -> int:
        return value

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class ProcessGroupTP:
    """A torch.distributed group: gloo for tensors on the CPU, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._device = device or torch.device("cpu")  # where its collectives run
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
    ) -> ProcessGroupTP:
        """Meet the other ranks at `init_method` (such as file:///path) and make this process's default group.

        `check` is called while some rank has not come yet, and may end the wait by raising.
        """
        cuda = device.type == "cuda"
        store, _, _ = next(rendezvous(init_method, rank, size))
        store.set(f"rank {rank}", b"")
        deadline = time.monotonic() + timeout_s
        while not store.check([f"rank {other}" for other in range(size)]) and time.monotonic() < deadline:
            check()
            time.sleep(_POLL)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if cuda else None,
        )
        assert dist.group.WORLD is not None
        return cls(dist.group.WORLD, device)

    def abort(self) -> None:
        if self._device.type == "cuda" and not self._aborted:  # gloo notices by itself
            self._aborted = True
            self._group.abort()

    def close(self) -> None:
        self.abort()  # destroying alone waits until every rank does it
        dist.destroy_process_group(self._group)

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.new_empty(self.size * x.numel())
        _all_gather(flat, x.flatten(), group=self._group)
        return flat.view(self.size, *x.shape).movedim(0, -2).reshape(*x.shape[:-1], self.size * x.shape[-1])

    def smallest(self, value: int) -> int:
        tensor = torch.tensor([value], device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor.item())

"""The two collectives that the layers use, the group of one, and the meeting of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

_POLL = 0.02  # seconds between looks at who has come


class TPGroup(Protocol):
    """Ranks that hold one model together. Every rank calls the same collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks, plus `residual`, of x's shape; may overwrite x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., size * n]: the ranks' tensors side by side in rank order."""
        ...

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values; waits for all of them."""
        ...

    def check(self) -> None:
        """Raise RuntimeError if a collective has ended because a rank, which it names, did not come, or by `abort`."""
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

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def smallest(self, value: int) -> int:
        return value

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def meet(
    rank: int, size: int, init_method: str, timeout_s: float, check: Callable[[], None], message: str = ""
) -> Store:
    """Meet the other ranks at `init_method` (such as file:///path); return a store in which `message` of each is found
    under "rank N".

    `check` is called while some rank has not come yet, and may end the wait by raising; after `timeout_s` the store is
    returned all the same, and waits for what is not in it.
    """
    store: Store
    store, _, _ = next(rendezvous(init_method, rank, size))
    store.set(f"rank {rank}", message)
    deadline = time.monotonic() + timeout_s
    while not store.check([f"rank {other}" for other in range(size)]) and time.monotonic() < deadline:
        check()
        time.sleep(_POLL)
    return store

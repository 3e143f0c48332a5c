"""The two collectives that the layers use, the group of one, and the meeting of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from minisgl.kernel.base import Norm

Summed: TypeAlias = tuple[Tensor, Tensor | None]
"""Sum over ranks, and its RMS norm if one kernel has computed both."""

_POLL = 0.02  # seconds between looks at who has come


class SharedRows(Protocol):
    """Memory of equal shape on each rank's GPU, which kernels of all ranks can read."""

    @property
    def own(self) -> Tensor:
        """This rank's, [rows, width]."""

    @property
    def addresses(self) -> Tensor:
        """Address of each rank's rows, int64 [ranks] on this rank's GPU."""


class TPGroup(Protocol):
    """Ranks that hold one model together. Every rank calls the same collectives in the same order.

    Operations with a body are for groups that have no faster way: these inherit them.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks, plus `residual`, of x's shape; may overwrite x."""

    def all_reduce_norm(self, x: Tensor, residual: Tensor, norm: Norm | None) -> Summed:  # noqa: ARG002
        """Return `all_reduce` of x [T, H] with its norm; may overwrite x."""
        return self.all_reduce(x, residual), None

    def product_sum(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm | None) -> Summed | None:  # noqa: ARG002
        """Return `all_reduce_norm` of x [T, K] @ weight [H, K]^T; None where that is the way.

        Overwrites the residual [T, H].
        """
        return None

    def all_gather(self, x: Tensor, width: int | None = None, out: Tensor | None = None) -> Tensor:
        """[T, n] -> [T, size * n]: the ranks' tensors side by side in rank order; the first `width` columns of them.

        Written to `out`, if given, which is contiguous.
        """

    def share_rows(self, rows: int, width: int, dtype: torch.dtype) -> SharedRows | None:  # noqa: ARG002
        """Memory [rows, width] on each rank; None where ranks do not reach each other's. All ranks ask together."""
        return None

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values; waits for all of them."""

    def check(self) -> None:
        """Raise RuntimeError if a collective has ended because a rank, which it names, did not come, or by `abort`."""

    def abort(self) -> None:
        """End the collectives that wait for a rank which is gone; from any thread. None can be called afterwards."""

    def close(self) -> None:
        """Leave the group, whatever the other ranks do. CUDA graphs that have its collectives must be gone."""


class SingleRank(TPGroup):
    """The group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor, width: int | None = None, out: Tensor | None = None) -> Tensor:
        x = x[:, :width]
        return x if out is None else out.copy_(x)

    def smallest(self, value: int) -> int:
        return value

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def side_by_side(gathered: Tensor, width: int | None, out: Tensor | None) -> Tensor:
    """Lay out what all ranks have, [size, T, n], as `TPGroup.all_gather` returns it."""
    columns = gathered.movedim(0, 1).flatten(1)[:, :width]
    return columns if out is None else out.copy_(columns)


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

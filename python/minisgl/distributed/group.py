"""The interface of a tensor-parallel group, the group of one rank, and the rendezvous of ranks."""

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

_POLL = 0.02  # seconds between checks which ranks have come


class SharedRows(Protocol):
    """Memory of equal shape on each rank's GPU, which kernels of all ranks can read."""

    @property
    def own(self) -> Tensor:
        """Memory of this rank, [rows, width]."""

    @property
    def addresses(self) -> Tensor:
        """Address of each rank's rows, int64 [ranks] on this rank's GPU."""


class TPGroup(Protocol):
    """Group of ranks that each hold a shard of the model. Every rank calls the same collectives in the same order.

    Methods with a body are defaults for groups without a faster implementation.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of x over ranks, plus `residual`; may overwrite x."""

    def all_reduce_norm(self, x: Tensor, residual: Tensor, norm: Norm | None) -> Summed:  # noqa: ARG002
        """Return `all_reduce` of x [T, H] with its norm; may overwrite x."""
        return self.all_reduce(x, residual), None

    def enable_sequence_parallel(self, tokens: int, width: int, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Divide the residual among the ranks from now on, in large steps of up to `tokens` tokens. A collective.

        There `all_reduce_norm` with a norm gives each rank the norm of all rows, but the sum of its share of the rows
        alone; it overwrites the residual, whose other rows become stale. The last sum of a step has no norm, and gives
        all rows to all ranks. What it returns, except for the residual, is overwritten by the next sum.

        Return False if no step is large enough for that to be faster.
        """
        return False

    def part_like(self, residual: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return memory to which a product may write x of `all_reduce_norm`; None if any memory is as good."""
        return None

    def product_sum(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm | None) -> Summed | None:  # noqa: ARG002
        """Return `all_reduce_norm` of x [T, K] @ weight [H, K]^T; None if the caller must compute it in two steps.

        Overwrites the residual [T, H].
        """
        return None

    def all_gather(self, x: Tensor, width: int | None = None, out: Tensor | None = None) -> Tensor:
        """Return the ranks' tensors [T, n], concatenated to [T, size * n] in rank order; the first `width` columns.

        The result is written to `out`, if given, which is contiguous.
        """

    def share_rows(self, rows: int, width: int, dtype: torch.dtype) -> SharedRows | None:  # noqa: ARG002
        """Return memory [rows, width] on each rank; None if ranks cannot read each other's memory. A collective."""
        return None

    def smallest(self, value: int) -> int:
        """Return the smallest of the ranks' values; waits for all ranks."""

    def largest(self, value: int) -> int:
        """Return the largest of the ranks' values; waits for all ranks."""
        return -self.smallest(-value)

    def check(self) -> None:
        """Raise RuntimeError if a collective has failed, because of a rank (named in the error) or by `abort`."""

    def abort(self) -> None:
        """End the collectives that wait for a rank that is gone, from any thread. No other can be called afterwards."""

    def close(self) -> None:
        """Leave the group without waiting for other ranks. CUDA graphs with its collectives must be freed before."""


class SingleRank(TPGroup):
    """Group of one rank."""

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
    """Return gathered tensors [size, T, n] in the layout of `TPGroup.all_gather`."""
    columns = gathered.movedim(0, 1).flatten(1)[:, :width]
    return columns if out is None else out.copy_(columns)


def meet(
    rank: int, size: int, init_method: str, timeout_s: float, check: Callable[[], None], message: str = ""
) -> Store:
    """Wait for the other ranks at `init_method` (such as file:///path); return a store with their messages.

    The store has the `message` of rank N under "rank N". `check` is called while some rank has not come, and may end
    the wait by raising. After `timeout_s` the store is returned even if a rank is missing; reading its message waits.
    """
    store: Store
    store, _, _ = next(rendezvous(init_method, rank, size))
    store.set(f"rank {rank}", message)
    deadline = time.monotonic() + timeout_s
    while not store.check([f"rank {other}" for other in range(size)]) and time.monotonic() < deadline:
        check()
        time.sleep(_POLL)
    return store

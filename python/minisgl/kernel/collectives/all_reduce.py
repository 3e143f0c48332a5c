"""All-reduce by writing into the peers' GPU memory: csrc/all_reduce.cu on one allocation of torch's symmetric memory.

NCCL takes some 20 us for the hidden states of a few rows, and a decode needs two all-reduces per layer; a write to a
peer arrives in 1 or 2 us. The ranks must be GPUs of one host that can access each other's memory, which is tested at
start. Otherwise, and for large tensors, NCCL is used. CUDA graphs can capture all calls, because the device itself
keeps track of which buffer is next.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.error_text import summary
from minisgl.kernel.base import Norm
from minisgl.kernel.collectives.long_sums import DTYPES, LongSums, supports_rows
from minisgl.kernel.collectives.symmetric_memory import SymmetricMemory, meet_alike, reaches_all
from minisgl.kernel.gemm.skinny_gemm import SkinnyGemm
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, VECTOR_BYTES, KernelSpec, Macros

logger = logging.getLogger(__name__)

# Constants of all_reduce.cu.
_BUFFERS = 3
_EMPTY = -(2**31)
_CONTROL_WORDS = 4
_FAILED_WORD = 3  # of Control, in push.cuh

_ANOTHER_RANK = "another rank does not reach its peers"
_NORM_MAX_ROWS = 256  # most rows that are normed in the same launch; with more, a separate norm is faster


class PushSizes(NamedTuple):
    """Largest tensors, in bytes, for which each algorithm of all_reduce.cu is the fastest."""

    one_shot: int
    two_shot: int  # 0: never

    def buffer_bytes(self, ranks: int) -> int:
        """Return the size of a rank's buffer for one call."""
        return max(ranks * self.one_shot, 2 * self.two_shot + ranks * VECTOR_BYTES)


# Limits by the number of ranks. Those for 2 and 4 ranks were measured on H200 (docs/performance.md): with 4 ranks two
# shots take 0.8 us less at 384 KB, but one shot can norm the sum in the same kernel. Those for 8 ranks were not
# measured: one_shot is the limit published for SGLang's kernels of this kind on H200, two_shot is a guess.
PUSH_SIZES = {2: PushSizes(4 << 20, 16 << 20), 4: PushSizes(384 << 10, 32 << 20), 8: PushSizes(128 << 10, 8 << 20)}

# Least bytes of a sum for which long_sum.cu is faster, by the number of ranks; other numbers were not measured. With it
# a prefill of Qwen3-32B took 3 to 4% less time over two H200 at 21 MB a sum and more, and 0.3% more at 10 MB; over four
# 5% less at 42 MB and more, and as long or up to 2% less at 21 MB.
LONG_BYTES = {2: 16 << 20, 4: 32 << 20}


class LaunchShape(NamedTuple):
    """Threads per block, and the most blocks per launch: as many as can run at the same time."""

    threads: int = 512
    max_blocks: int = 264


class PeerMemory(Protocol):
    """Memory of equal size on each rank's GPU, which all ranks can write to while this lives."""

    @property
    def addresses(self) -> Tensor:
        """Addresses at which each rank's memory begins, int64 [ranks], on this rank's GPU."""


class PushAllReduce:
    """A rank's side of the group. All ranks make the same calls in the same order, eagerly or in CUDA graphs.

    `memory`: three buffers of `sizes.buffer_bytes` on each rank, filled with EMPTY before any rank's first call.
    """

    def __init__(
        self,
        compiler: Compiler,
        rank: int,
        memory: PeerMemory,
        sizes: PushSizes,
        *,
        timeout_s: float,
        shape: LaunchShape = LaunchShape(),  # noqa: B008
    ) -> None:
        self._compiler = compiler
        self._skinny = SkinnyGemm(compiler)
        self._memory = memory
        self._ranks = len(memory.addresses)
        self._sizes = sizes
        self._timeout_s = timeout_s
        self._shape = shape
        self._control = torch.zeros(_CONTROL_WORDS, dtype=torch.int32, device=memory.addresses.device)
        self._status = torch.zeros(2, dtype=torch.int32, pin_memory=memory.addresses.is_cuda)
        self._buffer_bytes = sizes.buffer_bytes(self._ranks)
        # Arguments of every kernel that pushes, and of those that also wait for the other ranks.
        self._pushing: dict[str, Any] = {
            "addresses": memory.addresses,
            "control": self._control,
            "rank": rank,
            "buffer_bytes": self._buffer_bytes,
        }
        self._waiting: dict[str, Any] = {"status": self._status, "patience": int(timeout_s * 1e9)}

    def supports(self, x: Tensor) -> bool:
        """Return True if x is to be summed over ranks by these kernels; all ranks return the same."""
        return (
            0 < x.nbytes <= max(self._sizes)
            and x.nbytes % VECTOR_BYTES == 0
            and x.data_ptr() % VECTOR_BYTES == 0
            and x.is_contiguous()
            and x.dtype in DTYPES
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum over ranks, plus `residual`, which is contiguous and as large as x; overwrites x."""
        vectors = x.nbytes // VECTOR_BYTES
        one_shot = x.nbytes <= self._sizes.one_shot
        way = "one_shot" if one_shot else "two_shot"
        kernel = self._compiler.kernel(_spec, self._ranks, x.dtype, way, self._shape.threads)
        kernel(
            (self._blocks(vectors if one_shot else -(-vectors // self._ranks)),),
            self._shape.threads,
            x=x,
            residual=residual,
            out=x,
            vectors=vectors,
            **self._pushing,
            **self._waiting,
        )
        return x

    def norms(self, x: Tensor) -> bool:
        """Return True if x [T, H] is to be summed and normed by `sum_and_norm`; all ranks return the same."""
        in_one_shot = self.supports(x) and x.nbytes <= self._sizes.one_shot
        return in_one_shot and len(x) <= _NORM_MAX_ROWS and supports_rows(x.shape[-1], x.dtype)

    def sum_and_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the sum of x [T, H] over ranks plus `residual`, and its RMS norm; overwrites x with the sum."""
        normed = torch.empty_like(x)
        self._add_rows("one_shot_norm", norm, residual, x=x, out=x, normed=normed)
        return x, normed

    def multiplies(self, x: Tensor, weight: Tensor, residual: Tensor) -> bool:
        """Return True if these are to be multiplied and summed by `product_sum`; all ranks return the same."""
        return self._skinny.pushes(x, weight) and self.norms(residual)

    def product_sum(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum over ranks of x [T, K] @ weight [H, K]^T plus `residual` [T, H], and its RMS norm.

        Overwrites the residual with the sum.
        """
        self._skinny.push(x, weight, self._ranks, **self._pushing)
        normed = None if norm is None else torch.empty_like(residual)
        self._add_rows("received", norm, residual, out=residual, normed=normed)
        return residual, normed

    def _add_rows(self, kernel: str, norm: Norm | None, residual: Tensor, **tensors: Tensor | None) -> None:
        rows, size = residual.shape
        vectors = size * residual.itemsize // VECTOR_BYTES
        weight, eps = (None, 0.0) if norm is None else norm
        norm_dtype = residual.dtype if weight is None else weight.dtype
        launch = self._compiler.kernel(_norm_spec, kernel, self._ranks, residual.dtype, norm_dtype, self._shape.threads)
        launch(
            (min(rows, self._shape.max_blocks),),
            vectors,
            residual=residual,
            weight=weight,
            rows=rows,
            row_vectors=vectors,
            eps=eps,
            **tensors,
            **self._pushing,
            **self._waiting,
        )

    def gathers(self, x: Tensor, width: int | None = None) -> bool:
        """Return True if the ranks' x [T, n] are to be gathered by these kernels; all ranks return the same."""
        columns = x.shape[-1] if width is None else math.gcd(x.shape[-1], width)
        return (
            x.dim() == 2
            and 0 < self._ranks * x.nbytes <= self._buffer_bytes
            and columns * x.itemsize % VECTOR_BYTES == 0
            and x.data_ptr() % VECTOR_BYTES == 0
            and x.is_contiguous()
            and x.dtype in DTYPES
        )

    def gather(self, x: Tensor, width: int | None = None, out: Tensor | None = None) -> Tensor:
        """Concatenate the ranks' x [T, n] along the columns and return the first `width` columns, in `out` if given."""
        rows, columns = x.shape
        if width is None:
            width = self._ranks * columns
        if out is None:
            out = x.new_empty((rows, width))
        kernel = self._compiler.kernel(_spec, self._ranks, x.dtype, "gather", self._shape.threads)
        kernel(
            (self._blocks(x.nbytes // VECTOR_BYTES),),
            self._shape.threads,
            x=x,
            out=out,
            rows=rows,
            row_vectors=columns * x.itemsize // VECTOR_BYTES,
            out_vectors=width * x.itemsize // VECTOR_BYTES,
            **self._pushing,
            **self._waiting,
        )
        return out

    def share_rows(self, group: dist.ProcessGroup, rows: int, width: int, dtype: torch.dtype) -> RowsOfRanks | None:
        """Allocate [rows, width] on each rank; None if vectors of 16 bytes do not divide a row."""
        if width * dtype.itemsize % VECTOR_BYTES:
            return None
        memory = SymmetricMemory(group, self._memory.addresses.device, rows * width * dtype.itemsize)
        return RowsOfRanks(memory.words.view(dtype).view(rows, width), memory)

    def long_sums(self, group: dist.ProcessGroup, tokens: int, width: int, dtype: torch.dtype) -> LongSums | None:
        """Allocate memory for the sums of steps of LONG_BYTES or more, of up to `tokens` tokens.

        Return None if no step is that large, or no block can process a row. The ranks must meet before the first sum.
        """
        least = LONG_BYTES.get(self._ranks)
        sizes = range(0) if least is None else range(-(-least // (width * dtype.itemsize)), tokens + 1)
        if not sizes or not supports_rows(width, dtype):
            return None
        memory = SymmetricMemory(group, self._memory.addresses.device, LongSums.bytes_for(tokens, width, dtype))
        memory.words.zero_()
        shared = {"rank": self._pushing["rank"], "failed": self._control[_FAILED_WORD:], **self._waiting}
        return LongSums(self._compiler, memory, shared, sizes=sizes, width=width, dtype=dtype)

    def _blocks(self, vectors: int) -> int:
        return min(-(-vectors // self._shape.threads), self._shape.max_blocks)

    def abort(self) -> None:
        """End the calls that wait for a rank, and all later ones. May be called from any thread."""
        self._status[0] = 1

    def check(self) -> None:
        """Raise RuntimeError if a rank's data did not arrive in time in a call that has ended."""
        late_rank = int(self._status[1])
        if late_rank:
            raise RuntimeError(f"rank {late_rank - 1} did not come to an all-reduce within {self._timeout_s:.0f} s")


def _spec(ranks: int, dtype: torch.dtype, kernel: str, threads: int) -> KernelSpec:
    macros: Macros = {"RANKS": ranks, "SCALAR": SCALAR_NAMES[dtype], "THREADS": threads}
    return KernelSpec("all_reduce.cu", kernel, macros)


def _norm_spec(kernel: str, ranks: int, dtype: torch.dtype, norm_dtype: torch.dtype, threads: int) -> KernelSpec:
    spec = _spec(ranks, dtype, kernel, threads)
    return replace(spec, macros={**spec.macros, "NORM_SCALAR": SCALAR_NAMES[norm_dtype]})


@dataclass(frozen=True, slots=True)
class RowsOfRanks:
    """Implements `distributed.group.SharedRows`."""

    own: Tensor
    memory: SymmetricMemory

    @property
    def addresses(self) -> Tensor:
        return self.memory.addresses


def connect_push(
    group: dist.ProcessGroup,
    device: torch.device,
    smallest: Callable[[int], int],
    timeout_s: float,
    sizes: PushSizes | None = None,
) -> PushAllReduce | None:
    """Return this rank's side; None, after a log line, if some rank cannot reach another.

    `smallest` returns the least of the ranks' values once all ranks have called it, after the work that is queued on
    their current streams. `sizes`: the limits of the algorithms, if not those for this number of ranks.
    """
    connected = _connect(group, device, smallest, timeout_s, sizes)
    if isinstance(connected, PushAllReduce):
        return connected
    level = logging.WARNING if group.rank() == 0 else logging.DEBUG
    logger.log(level, "all-reduce by NCCL alone, slower: %s", connected)
    return None


def _connect(
    group: dist.ProcessGroup,
    device: torch.device,
    smallest: Callable[[int], int],
    timeout_s: float,
    sizes: PushSizes | None,
) -> PushAllReduce | str:
    """Return this rank's side, or why there is none. All ranks give up at the same point, so none waits for another."""
    rank, ranks = group.rank(), group.size()
    why = _obstacle(rank, ranks, device)
    if not smallest(why is None):
        return why or _ANOTHER_RANK
    if (why := meet_alike(device, smallest)) is not None:
        return why
    sizes = sizes or PUSH_SIZES[ranks]
    memory: SymmetricMemory | None = None
    try:
        memory = SymmetricMemory(group, device, _BUFFERS * sizes.buffer_bytes(ranks))
    except Exception as error:  # whatever torch, the driver or the container makes of it
        why = f"no symmetric memory: {summary(error)}"
    if not smallest(memory is not None) or memory is None:
        return why or _ANOTHER_RANK
    if not smallest(reaches_all(memory, rank, ranks, smallest)):
        return "what one GPU writes another does not read"
    memory.words.fill_(_EMPTY)
    smallest(1)  # all ranks have filled their buffers
    return PushAllReduce(Compiler(device), rank, memory, sizes, timeout_s=timeout_s)


def _obstacle(rank: int, ranks: int, device: torch.device) -> str | None:
    """Return why this rank cannot reach its peers, or None."""
    if ranks not in PUSH_SIZES:
        return f"the kernels are for {', '.join(map(str, PUSH_SIZES))} ranks"
    unreachable = [
        str(peer) for peer in range(ranks) if peer != rank and not torch.cuda.can_device_access_peer(device, peer)
    ]
    return f"no peer access from {device} to GPU {', '.join(unreachable)}" if unreachable else None

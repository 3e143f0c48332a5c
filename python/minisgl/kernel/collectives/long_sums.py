"""Sums over ranks in steps of many tokens: csrc/long_sum.cu on one allocation of torch's symmetric memory.

NCCL's all-reduce takes a fifth of a large prefill over four GPUs. Here one kernel adds up the ranks' parts of a block's
output, adds the residual and computes the norm. Products write their parts to the memory that all ranks read.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from minisgl.kernel.base import Norm
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, VECTOR_BYTES, KernelSpec, Macros

# Constants of long_sum.cu.
_CONTROL_WORDS = 2
_FLAGS_BYTES = 128  # at the beginning of each rank's memory: Flags of up to 16 ranks, and rows stay aligned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_THREADS = 264 * 640  # of a launch: two rows of 5,120 values on each multiprocessor of an H200


class RankMemory(Protocol):
    """Memory of equal size on each rank's GPU, which all ranks can read and write while this lives.

    Its flags are zero before any rank's first call.
    """

    @property
    def words(self) -> Tensor:
        """Memory of this rank, int32 of `LongSums.bytes_for`."""

    @property
    def addresses(self) -> Tensor:
        """Addresses at which each rank's memory begins, int64 [ranks], on this rank's GPU."""


class LongSums:
    """A rank's side. All ranks make the same calls in the same order, eagerly or in CUDA graphs.

    The memory has flags, then parts [T, width] of the most tokens T of `sizes`, then results of as many.
    """

    def __init__(
        self,
        compiler: Compiler,
        memory: RankMemory,
        shared: dict[str, Any],
        *,
        sizes: range,
        width: int,
        dtype: torch.dtype,
        max_blocks: int | None = None,
    ) -> None:
        """`sizes`: numbers of tokens of the steps that are summed here.

        `shared`: rank, status, failed and patience, which are arguments of every launch. `max_blocks`: most blocks of a
        launch, where several ranks share a GPU.
        """
        self._compiler, self._memory, self._shared = compiler, memory, shared
        self._ranks, self._sizes, self._dtype = len(memory.addresses), sizes, dtype
        self._row_vectors = width * dtype.itemsize // VECTOR_BYTES
        self._blocks = max_blocks or max(_THREADS // self._row_vectors, 1)
        self._control = torch.zeros(_CONTROL_WORDS, dtype=torch.int32, device=memory.words.device)
        rows = memory.words.view(torch.uint8)[_FLAGS_BYTES:].view(dtype).view(2, sizes[-1], width)
        self._parts: Tensor = rows[0]
        self._results: Tensor = rows[1]

    @staticmethod
    def bytes_for(tokens: int, width: int, dtype: torch.dtype) -> int:
        """Return the size of a rank's memory."""
        return _FLAGS_BYTES + 2 * tokens * width * dtype.itemsize

    def part_like(self, x: Tensor) -> Tensor | None:
        """Return memory for this rank's part of a sum like x [T, width]; None if such sums are not for this kernel."""
        part = self._parts[: len(x)]
        return part if len(x) in self._sizes and x.shape == part.shape and x.dtype == self._dtype else None

    def add(self, part: Tensor, residual: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
        """Return the sum over ranks of what is in `part`, the memory of `part_like`, plus `residual`, and its norm.

        With a norm only the rank's share of the residual is the new one. Without a norm all of the sum is returned. The
        next sum overwrites what is returned, except for the residual.
        """
        results = self._results[: len(part)]
        weight, eps = (None, 0.0) if norm is None else norm
        norm_dtype = self._dtype if weight is None else weight.dtype
        kernel = self._compiler.kernel(long_sum_spec, self._ranks, self._dtype, norm_dtype, self._row_vectors)
        kernel(
            (self._blocks,),
            self._row_vectors,
            residual=residual,
            weight=weight,
            addresses=self._memory.addresses,
            control=self._control,
            rows=len(part),
            parts=_FLAGS_BYTES,
            results=_FLAGS_BYTES + self._parts.nbytes,
            eps=eps,
            **self._shared,
        )
        return (results, None) if norm is None else (residual, results)


def supports_rows(width: int, dtype: torch.dtype) -> bool:
    """Return True if one block can process a row, with a thread for each vector."""
    vectors, rest = divmod(width * dtype.itemsize, VECTOR_BYTES)
    return dtype in DTYPES and rest == 0 and vectors % 32 == 0 and vectors <= 1024


def long_sum_spec(ranks: int, dtype: torch.dtype, norm_dtype: torch.dtype, row_vectors: int) -> KernelSpec:
    macros: Macros = {
        "RANKS": ranks,
        "SCALAR": SCALAR_NAMES[dtype],
        "NORM_SCALAR": SCALAR_NAMES[norm_dtype],
        "ROW_VECTORS": row_vectors,
    }
    return KernelSpec("long_sum.cu", "long_sum", macros)

"""GEMMs of some tens of rows, for decode batches, on csrc/small_batch_gemm.cu (Hopper)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.base import Activation, Product
from minisgl.kernel.launch.compile import Compiler, tensor_map
from minisgl.kernel.launch.signature import MAX_EARLY_ROWS, SCALAR_NAMES, SHARED_BEFORE_ATTENTION, KernelSpec, Macros

MAX_ROWS = MAX_EARLY_ROWS  # with more, cuBLAS is as fast or faster
_MIN_ROWS = 9  # skinny_gemm.py has fewer, and up to 16 with small weights
_X_ROWS = 32, MAX_ROWS  # rows of x in a stage
_BLOCK_K = 64  # columns of a stage, as in small_batch_gemm.cu
_THREADS = 160  # threads per block, as in small_batch_gemm.cu
_MIN_SIZE = 1 << 20  # fewest values of a weight; smaller ones leave most multiprocessors idle
_MAX_WIDTH = 1 << 16  # most rows of a weight that is not a vocabulary's
# For a vocabulary's weight, cuBLAS also reaches nearly the memory's bandwidth, but begins late. This kernel gains
# little, so it is used only where it was measured: with K in this range, for more than 32 rows of x.
_VOCABULARY_SIZES = range(2880, 4097)
_SMALL = 1 << 23  # values of a weight up to which many narrow blocks hold it at once; larger ones stream
_MAX_CLUSTER = 8
_FEW_STEPS = 64  # stages of K up to which four blocks divide it rather than two, where x is as large as the weight
_MAX_GATED = 256  # most rows of a gated weight in a block, half of them gates
_MAX_STAGES = 16
_RING_BYTES = {1: 220 << 10, 2: 110 << 10, 3: 73 << 10}  # bytes per block, by blocks on a multiprocessor


class Tiling(NamedTuple):
    """Division of a product among blocks: macros of small_batch_gemm.cu, and further launch parameters."""

    dtype: torch.dtype
    x_rows: int  # rows of x in a stage
    block_n: int  # rows of the weight
    split: int  # blocks of a cluster, which divide K
    stages: int
    gate: Activation | None
    blocks: int  # on a multiprocessor
    before_attention: bool


class SmallBatchGemm:
    """Compiles the kernel once for each kind of product that is used."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def begin_compiling(self, dtype: torch.dtype, products: Iterable[Product]) -> None:
        """Begin to compile the kernels of these products."""
        num_sms = self._compiler.num_sms
        tilings = {
            choose_tiling(dtype, rows, width, size, num_sms, gate=gate, before_attention=norm and gate is None)
            for width, size, norm, gate in products
            for rows in _X_ROWS
            if self._supports(dtype, rows, width, size)
        }
        self._compiler.begin(map(_spec, tilings))

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if the kernel supports x [M, K] @ weight [N, K]^T; the caller asks skinny_gemm.py first."""
        rows, size = x.shape
        return (
            _MIN_ROWS <= rows <= MAX_ROWS
            and self._supports(x.dtype, rows, len(weight), size)
            and x.is_contiguous()
            and weight.is_contiguous()
        )

    def _supports(self, dtype: torch.dtype, rows: int, width: int, size: int) -> bool:
        """Return True if the kernel supports x [rows, size] and a weight [width, size]."""
        return (
            self._compiler.arch == 90
            and dtype in (torch.bfloat16, torch.float16)
            and size % _BLOCK_K == 0
            and width % 8 == 0
            and (width <= _MAX_WIDTH or (rows > _X_ROWS[0] and size in _VOCABULARY_SIZES))
            and width * size >= _MIN_SIZE
        )

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        gate: Activation | None = None,
        before_attention: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """[M, N], or [M, N / 2] with the activation of a `gate`; see Ops.linear and norm_gated_linear.

        `before_attention`: the next kernel is attention, which begins early and reads through L1 (signature.py).
        """
        (rows, size), width = x.shape, len(weight)
        outputs = width if gate is None else width // 2
        if out is None:
            out = x.new_empty((rows, outputs))
        tiling = choose_tiling(
            x.dtype, rows, width, size, self._compiler.num_sms, gate=gate, before_attention=before_attention
        )
        box_rows = tiling.block_n if gate is None else tiling.block_n // 2
        kernel = self._compiler.kernel(_spec, tiling)
        kernel(
            (1, -(-outputs // box_rows)),
            _THREADS,
            x_map=tensor_map(x, tiling.x_rows, _BLOCK_K),
            w_map=tensor_map(weight, box_rows, _BLOCK_K),
            bias=bias,
            residual=residual,
            out=out,
            M=rows,
            N=width,
            K=size,
            cluster=tiling.split,
        )
        return out


def _spec(tiling: Tiling) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[tiling.dtype],
        "X_ROWS": tiling.x_rows,
        "BLOCK_N": tiling.block_n,
        "SPLIT": tiling.split,
        "STAGES": tiling.stages,
        "GATED": int(tiling.gate is not None),
        "GELU_TANH": int(tiling.gate == "gelu_tanh"),
        "BLOCKS": tiling.blocks,
    }
    ring = tiling.stages * (tiling.x_rows + tiling.block_n) * _BLOCK_K * 2
    received = 0 if tiling.split == 1 else tiling.split * -(-tiling.x_rows // tiling.split)  # rows of sums
    sums = (tiling.x_rows + received) * (tiling.block_n + 8) * 4
    return KernelSpec(
        "small_batch_gemm.cu",
        "small_batch_gemm",
        macros,
        shared_bytes=max(ring, sums),
        sm_shared_bytes=SHARED_BEFORE_ATTENTION if tiling.before_attention else 0,
    )


def choose_tiling(
    dtype: torch.dtype,
    rows: int,
    width: int,
    size: int,
    num_sms: int,
    *,
    gate: Activation | None,
    before_attention: bool,
) -> Tiling:
    """Divide x [rows, size] @ weight [width, size]^T among blocks.

    The rows of the weight are divided among the multiprocessors as evenly as possible. But a block should not read much
    more of x than of the weight, because the bandwidth of L2 is limited, too. For a large weight, clusters of 2, 4 or 8
    blocks divide K; clusters of 3 would leave multiprocessors idle. Before attention, a multiprocessor has one block
    with the ring size of two resident blocks, because a larger ring would leave no L1 for attention.
    """
    steps, x_rows = size // _BLOCK_K, min(count for count in _X_ROWS if rows <= count)
    if width > _MAX_WIDTH:
        block_n, split, blocks, before_attention = 128, 1, 2, False
    elif width * size <= _SMALL:
        block_n, blocks = 32 if gate is None else 64, 2
        tiles = -(-width // block_n)
        before_attention = before_attention and tiles <= num_sms
        most = num_sms if before_attention else num_sms * 16 // 11  # 192 on an H200: most hold one block, some two
        split = max(1, min(most // tiles, steps // 8, _MAX_CLUSTER))
    elif gate is not None:
        blocks = next((b for b in (1, 2) if _share(width, b * num_sms, 16) <= _MAX_GATED), 3)
        most = _MAX_GATED if blocks < 3 else 128
        block_n, split = min(max(_share(width, blocks * num_sms, 16), 64), most), 1
    else:
        blocks, split = 1, 1
        while _share(width * split, num_sms, 8) < (64 if split == 1 else 40) and split < min(_MAX_CLUSTER, steps):
            split *= 2
        block_n = min(max(_share(width * split, num_sms, 8), 40), 128)
        if split == 2 and block_n < x_rows and steps <= _FEW_STEPS and not before_attention:
            block_n, split, blocks = 64, 4, 2  # else a block would read more of x than of the weight
    ring = _RING_BYTES[2 if before_attention else blocks]
    stages = min(ring // ((x_rows + block_n) * _BLOCK_K * 2), -(-steps // split), _MAX_STAGES)
    return Tiling(dtype, x_rows, block_n, split, stages, gate, blocks, before_attention)


def _share(width: int, blocks: int, unit: int) -> int:
    """Return the rows of a block if `blocks` blocks divide `width` rows evenly, a multiple of `unit`."""
    return -(-width // (blocks * unit)) * unit

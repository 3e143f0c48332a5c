"""Skinny GEMMs on csrc/skinny_gemm.cu: the decode of a small batch is bound by reading every weight once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.base import Activation, Norm, Product
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, SHARED_BEFORE_ATTENTION, KernelSpec, Macros

_SMALL = 1 << 23  # values of a weight up to which it is divided into many narrow blocks; else clusters divide K
_MAX_ROWS = 16  # most rows of x for a small weight
_MAX_ROWS_OF_LARGE = 8  # beyond, small_batch_gemm.py or cuBLAS is faster
_THREADS = 128  # threads per block, as in skinny_gemm.cu
_STAGE = 4096  # values of a weight in a stage, as in skinny_gemm.cu
_CLUSTERS = 2, 4, 8  # blocks of a cluster for a large weight; GPUs before Hopper have none
_STAGES = 7, 5  # for a large weight, in order of preference; the first is also the most for a small one
_FEW_STAGES = 4  # if neither is fast enough: more blocks then run at a time
_IN_FLIGHT = 128 << 10  # bytes in flight to a multiprocessor that keep the memory busy
_ENOUGH = 0.88  # share of the memory's speed, estimated by `_speed`, that ends the search for a tiling
_FULL = 0.9  # occupancy of the GPU beyond which clusters of more than two blocks do not all fit in one wave
_SHALLOW = 0.8  # factor of the speed of several waves of blocks whose rings are short, or filled less than twice
_STATIC_BYTES = 5 << 10  # most shared memory besides the ring
_RING_BEFORE_ATTENTION = 56 << 10  # most bytes of the ring, so that early blocks of attention fit too


class Gpu(NamedTuple):
    """Facts of a GPU that the tiling depends on."""

    num_sms: int
    has_clusters: bool
    ring_bytes: int  # most shared memory for the ring of a block


class Tiling(NamedTuple):
    """Division of a product among blocks: macros of skinny_gemm.cu, and further launch parameters."""

    dtype: torch.dtype
    max_rows: int  # most rows of x
    block_n: int  # rows of the weight
    cluster: int
    stages: int
    norm: bool
    gate: Activation | None
    before_attention: bool


class SkinnyGemm:
    """Compiles the kernel once for each kind of product that is used."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        ring_bytes = compiler.block_shared_bytes - _STATIC_BYTES
        self._gpu = Gpu(compiler.num_sms, compiler.arch >= 90, ring_bytes)

    def begin_compiling(self, dtype: torch.dtype, products: Iterable[Product], *, norms_late: bool) -> None:
        """Begin to compile the kernels of these products for any number of rows. `norms_late`: with their norms."""
        tilings = {
            choose_tiling(
                self._gpu,
                dtype,
                rows,
                width,
                size,
                norm=norm and norms_late,
                gate=gate,
                before_attention=norm and gate is None,
            )
            for width, size, norm, gate in products
            for rows in (8, _MAX_ROWS)
            if _supports(dtype, rows, width, size)
        }
        self._compiler.begin(map(_spec, tilings))

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if x [M, K] @ weight [N, K]^T is a product that the kernel is for."""
        rows, size = x.shape
        return _supports(x.dtype, rows, len(weight), size) and x.is_contiguous() and weight.is_contiguous()

    def product(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        gate: Activation | None = None,
        before_attention: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """[M, N], or [M, N / 2] with the activation of a `gate`; see Ops.linear, norm_linear and norm_gated_linear.

        `before_attention`: the next kernel is attention, which begins early and reads through L1 (signature.py).
        """
        (rows, size), width = x.shape, len(weight)
        if out is None:
            out = x.new_empty((rows, width if gate is None else width // 2))
        has_norm = norm is not None
        tiling = choose_tiling(
            self._gpu, x.dtype, rows, width, size, norm=has_norm, gate=gate, before_attention=before_attention
        )
        kernel = self._compiler.kernel(_spec, tiling)
        kernel(
            (1, -(-width // tiling.block_n)),
            _THREADS,
            x=x,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            weight=weight,
            bias=bias,
            residual=residual,
            out=out,
            M=rows,
            N=width,
            K=size,
            cluster=tiling.cluster,
        )
        return out

    def pushes(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if `push` takes x [M, K] and weight [N, K]."""
        return self.supports(x, weight) and self._compiler.arch >= 90

    def push(
        self,
        x: Tensor,
        weight: Tensor,
        ranks: int,
        *,
        addresses: Tensor,
        control: Tensor,
        rank: int,
        buffer_bytes: int,
    ) -> None:
        """Send x [M, K] @ weight [N, K]^T to all ranks, as this rank's part of an all-reduce (csrc/push.cuh)."""
        (rows, size), width = x.shape, len(weight)
        tiling = choose_tiling(self._gpu, x.dtype, rows, width, size)
        kernel = self._compiler.kernel(_push_spec, tiling, ranks)
        kernel(
            (1, -(-width // tiling.block_n)),
            _THREADS,
            x=x,
            weight=weight,
            addresses=addresses,
            control=control,
            rank=rank,
            buffer_bytes=buffer_bytes,
            M=rows,
            N=width,
            K=size,
            cluster=tiling.cluster,
        )


def _supports(dtype: torch.dtype, rows: int, width: int, size: int) -> bool:
    """Return True if the kernel can multiply x [rows, size] by weight [width, size]^T, and faster than cuBLAS."""
    return (
        0 < rows <= (_MAX_ROWS if width * size <= _SMALL else _MAX_ROWS_OF_LARGE)
        and dtype in (torch.bfloat16, torch.float16)
        and size % 64 == 0
        and width % 8 == 0
    )


def _spec(tiling: Tiling) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[tiling.dtype],
        "M_MAX": tiling.max_rows,
        "BLOCK_N": tiling.block_n,
        "CLUSTER": tiling.cluster,
        "STAGES": tiling.stages,
        "NORM": int(tiling.norm),
        "GATED": int(tiling.gate is not None),
        "GELU_TANH": int(tiling.gate == "gelu_tanh"),
    }
    return KernelSpec(
        "skinny_gemm.cu",
        "skinny_gemm",
        macros,
        shared_bytes=tiling.stages * _stage_bytes(tiling.block_n, tiling.max_rows, norm=tiling.norm),
        sm_shared_bytes=SHARED_BEFORE_ATTENTION if tiling.before_attention else 0,
    )


def _push_spec(tiling: Tiling, ranks: int) -> KernelSpec:
    spec = _spec(tiling)
    return replace(spec, name="skinny_gemm_push", macros={**spec.macros, "RANKS": ranks})


def choose_tiling(
    gpu: Gpu,
    dtype: torch.dtype,
    rows: int,
    width: int,
    size: int,
    *,
    norm: bool = False,
    gate: Activation | None = None,
    before_attention: bool = False,
) -> Tiling:
    """Divide x [rows, size] @ weight [width, size]^T among blocks.

    For a large weight, K is divided among the smallest clusters that keep the memory busy enough; if none does, among
    the fastest.
    """
    num_sms, has_clusters, ring_bytes = gpu
    max_rows = 8 if rows <= 8 else 16
    if width * size <= _SMALL and size % 256 == 0:
        stage_bytes = _stage_bytes(16, max_rows, norm=norm)
        stages = min(size // 256 + 1, 9, ring_bytes // stage_bytes)
        # Two resident blocks per SM are faster than a second wave of few blocks. Measured on Hopper only.
        if has_clusters and num_sms < -(-width // 16) <= 2 * num_sms:
            stages = min(stages, _STAGES[0], (ring_bytes - _STATIC_BYTES) // 2 // stage_bytes)
        # On GPUs with clusters, kernels begin early. Longer products have not been measured with such a short ring.
        before_attention = before_attention and has_clusters and size <= 1024
        if before_attention:
            stages = min(stages, _RING_BEFORE_ATTENTION // stage_bytes)
        return Tiling(dtype, max_rows, 16, 1, stages, norm, gate, before_attention)
    stage_bytes = _stage_bytes(64, max_rows, norm=norm)
    clusters = _CLUSTERS if has_clusters else (1,)
    ways = [
        (cluster, stages)
        for numbers in (_STAGES, (_FEW_STAGES,))
        for cluster in clusters
        for stages in numbers
        if cluster <= size // 64 or cluster == clusters[0]
    ]
    speeds = [
        _speed(
            -(-width // 64),
            size // 64,
            cluster,
            stages,
            num_sms=num_sms,
            blocks_of_sm=(ring_bytes + _STATIC_BYTES) // (stages * stage_bytes + _STATIC_BYTES),
        )
        for cluster, stages in ways
    ]
    best = next(
        (way for way, speed in zip(ways, speeds, strict=True) if speed >= _ENOUGH), ways[speeds.index(max(speeds))]
    )
    return Tiling(dtype, max_rows, 64, *best, norm, gate, False)


def _speed(clusters: int, steps: int, cluster: int, stages: int, *, num_sms: int, blocks_of_sm: int) -> float:
    """Estimate the share of the memory's bandwidth that this many clusters reach when they divide K's `steps` stages.

    The blocks that run at a time must have enough bytes in flight, and a last wave of few blocks takes as long as a
    full one. Fitted to chains of products and whole steps on an H200.
    """
    blocks, at_a_time = clusters * cluster, blocks_of_sm * num_sms
    in_flight = min(blocks / num_sms, blocks_of_sm) * stages * 2 * _STAGE
    speed = min(in_flight / _IN_FLIGHT, 1.0)
    waves = -(-blocks // at_a_time)
    if waves == 1 and cluster > 2 and blocks > _FULL * at_a_time:
        waves = 2
    if waves == 1:
        return speed
    if stages < _STAGES[0] or steps < 2 * stages * cluster:
        speed *= _SHALLOW
    return speed * blocks / (at_a_time * waves)


def _stage_bytes(block_n: int, max_rows: int, *, norm: bool) -> int:
    """Return the bytes of a stage: columns of the weight's rows, of x, and of the norm's weight."""
    return 2 * _STAGE // block_n * (block_n + max_rows + norm)

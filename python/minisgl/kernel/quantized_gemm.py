"""Products with packed quantized weights on csrc/quantized_gemm.cu (Hopper), and their values for many rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.base import Activation
from minisgl.kernel.compile import Compiler, tensor_map
from minisgl.kernel.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.quantization.gpu_layout import BITS, CHUNK, TILE, PackedLevels
from minisgl.quantization.levels import Kind, LevelFormat

MAX_ROWS = 64  # of x, that a block takes; or _LARGE_BLOCK with scales of rows alone, for which registers suffice
_LARGE_BLOCK = 128
# Of x altogether. Above, it is faster to write the values in x's dtype and let cuBLAS multiply them.
_MOST_ROWS = {"row scales": 256, "group scales": 192}
_MIN_BLOCK_K = 64  # columns of a stage
_VALUES_CHUNKS = 4  # of a block, as in dequantize.cu
RING_BYTES = {1: 216 << 10, 2: 108 << 10, 3: 70 << 10}  # of shared memory, by blocks on a multiprocessor
MAX_STAGES = 16
FEW_ROWS_SPLIT_COST = 0.03  # see `fewest_waves`
_WEIGHTS: dict[Kind, str] = {"fp8": "E4M3", "int8": "INT8", "int4": "INT4"}
_GROUPS: dict[Kind, tuple[int, ...]] = {"fp8": (0, 128), "int8": (0,), "int4": (32, 64, 128)}


def max_rows(group: int) -> int:
    """Return the most rows of x that are multiplied with a weight as it is stored."""
    return _MOST_ROWS["group scales" if group else "row scales"]


class Division(NamedTuple):
    """Division of a product among blocks: macros of quantized_gemm.cu."""

    max_rows: int  # of x, of a block
    warpgroups: int  # of 64 rows of the weight each
    split: int  # blocks that divide K
    block_k: int  # columns of a stage
    stages: int
    blocks: int  # on a multiprocessor


class _Kernel(NamedTuple):
    dtype: torch.dtype
    kind: Kind
    group: int
    gate: Activation | None
    gated: bool
    division: Division | None = None


class QuantizedGemm:
    """Compiles the kernel once for each kind of product that is asked for."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def begin_compiling(self, weight: PackedLevels, dtype: torch.dtype) -> None:
        """Begin to compile the products with a weight; of a gated one those with silu."""
        gate: Activation | None = "silu" if weight.gated else None
        specs = [_values_spec(_Kernel(dtype, weight.kind, weight.group, None, weight.gated))]
        for rows in (8, 16, 32, MAX_ROWS, _LARGE_BLOCK, max_rows(weight.group)):
            division = divide(weight.kind, rows, weight.width, weight.size, weight.group, self._compiler.num_sms)
            specs.append(_product_spec(_Kernel(dtype, weight.kind, weight.group, gate, weight.gated, division)))
        self._compiler.begin(specs)

    def supports(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        """Return True if the kernels read a weight [width, size] of this format in products of this dtype."""
        columns = max(CHUNK[form.kind], form.group, _MIN_BLOCK_K)
        groups = _GROUPS.get(form.kind, ())
        return (
            self._compiler.arch == 90
            and dtype in (torch.bfloat16, torch.float16)
            and form.group in groups
            and size % columns == 0
            and width % 16 == 0
        )

    def takes(self, x: Tensor, weight: PackedLevels) -> bool:
        """Return True if x has so few rows that the products are for it."""
        return 0 < len(x) <= max_rows(weight.group) and x.is_contiguous()

    def product(
        self,
        x: Tensor,
        weight: PackedLevels,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        gate: Activation | None = None,
        out: Tensor | None = None,
        division: Division | None = None,
    ) -> Tensor:
        """[M, N], or [M, N / 2] with the activation of a `gate`; see Ops.linear and norm_gated_linear."""
        rows, (width, size) = len(x), (weight.width, weight.size)
        outputs = width if gate is None else width // 2
        if out is None:
            out = x.new_empty((rows, outputs))
        if division is None:
            division = divide(weight.kind, rows, width, size, weight.group, self._compiler.num_sms)
        kernel = self._compiler.kernel(
            _product_spec, _Kernel(x.dtype, weight.kind, weight.group, gate, weight.gated, division)
        )
        kernel(
            (1, -(-width // (division.warpgroups * TILE)), -(-rows // division.max_rows)),
            division.warpgroups * 128 + 32,
            x_map=tensor_map(x, division.max_rows, 64),
            weight=weight.words,
            scales=weight.group_scales,
            row_scales=weight.row_scales,
            bias=bias,
            residual=residual,
            out=out,
            M=rows,
            N=width,
            K=size,
            cluster=division.split,
        )
        return out

    def values(self, weight: PackedLevels, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the matrix [out, in] in `dtype`."""
        if out is None:
            out = torch.empty((weight.width, weight.size), dtype=dtype, device=weight.words.device)
        tiles, chunks, _ = weight.words.shape
        kernel = self._compiler.kernel(_values_spec, _Kernel(dtype, weight.kind, weight.group, None, weight.gated))
        kernel(
            (-(-chunks // _VALUES_CHUNKS), tiles),
            128,
            weight=weight.words,
            scales=weight.group_scales,
            row_scales=weight.row_scales,
            out=out,
            N=weight.width,
            K=weight.size,
            early=False,
        )
        return out


def _macros(kind: _Kernel) -> dict[str, str | int]:
    return {
        "SCALAR": SCALAR_NAMES[kind.dtype],
        "WEIGHT": _WEIGHTS[kind.kind],
        "GROUP": kind.group,
        "GATED": int(kind.gated),
        "GELU_TANH": int(kind.gate == "gelu_tanh"),
    }


def _values_spec(kind: _Kernel) -> KernelSpec:
    return KernelSpec("dequantize.cu", "dequantize", _macros(kind))


def _product_spec(kind: _Kernel) -> KernelSpec:
    division = kind.division
    assert division is not None
    macros: Macros = {
        **_macros(kind),
        "M_MAX": division.max_rows,
        "WARPGROUPS": division.warpgroups,
        "SPLIT": division.split,
        "BLOCK_K": division.block_k,
        "STAGES": division.stages,
        "BLOCKS": division.blocks,
    }
    ring = division.stages * stage_bytes(kind.kind, kind.group, division)
    shared_bytes = max(ring, sums_bytes(division))
    return KernelSpec("quantized_gemm.cu", "quantized_gemm", macros, shared_bytes=shared_bytes)


def sums_bytes(division: Division) -> int:
    """Memory of a block's own sums, and of those that others send it (csrc/column_sums.cuh)."""
    own = division.warpgroups * TILE * (division.max_rows + 2) * 4
    return own if division.split == 1 else 2 * own


def stage_bytes(kind: Kind, group: int, division: Division) -> int:
    """Size of a stage: columns of x, of the weight's rows, and their scales."""
    weight = TILE * division.block_k * BITS[kind] // 8
    scales = division.block_k // group * TILE * 4 if group else 0
    size = division.max_rows * division.block_k * 2 + division.warpgroups * (weight + scales)
    return -(-size // 1024) * 1024


def divide(kind: Kind, rows: int, width: int, size: int, group: int, num_sms: int) -> Division:
    """Divide x [rows, size] @ weight [width, size]^T, as the fastest of those were that have been measured."""
    largest = MAX_ROWS if group else _LARGE_BLOCK
    block_m = next(each for each in (8, 16, 32, 64, 128) if rows <= each or each == largest)
    warpgroups, blocks, split_cost = (1, 3, FEW_ROWS_SPLIT_COST) if block_m <= MAX_ROWS else (2, 1, 0.15)
    if kind == "int4" and block_m <= 16 and size % 256 == 0:
        block_k = 256  # as many bytes as of the other formats
    elif size % 128 == 0 and (group or block_m < 64):
        block_k = 128
    else:
        block_k = 64
    tiles, steps = -(-width // (warpgroups * TILE)) * -(-rows // block_m), size // block_k
    split = fewest_waves(tiles, steps, num_sms * blocks, split_cost)
    division = Division(block_m, warpgroups, split, block_k, 0, blocks)
    room = RING_BYTES[blocks] // stage_bytes(kind, group, division)
    return division._replace(stages=max(2, min(room, -(-steps // split), MAX_STAGES)))


def fewest_waves(tiles: int, steps: int, slots: int, split_cost: float) -> int:
    """Return by how many blocks K, of so many steps, is divided, if `slots` blocks run at a time.

    They come in waves, each of which reads 1 / split of K; and more blocks have more sums to exchange, which for each
    costs `split_cost` of a wave.
    """
    splits = [split for split in (1, 2, 4, 8) if steps // split >= 2 or split == 1]
    return min(splits, key=lambda split: -(-tiles * split // slots) / split + split_cost * split)

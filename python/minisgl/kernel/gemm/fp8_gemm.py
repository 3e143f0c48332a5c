"""FP8 GEMMs (W8A8): rows quantized by csrc/quantize.cu, and the kernels that multiply them.

Up to MOST_ROWS rows csrc/fp8_gemm.cu is used. For more rows and block scales, it is csrc/fp8_persistent_gemm.cu or
torch, whichever is estimated to be faster; for more rows and row scales, a library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from minisgl.kernel.base import Activation, Norm
from minisgl.kernel.gemm.fp8_rows import GROUP, MOST_ROWS, Fp8Rows, empty_rows
from minisgl.kernel.gemm.fp8_schedule import (
    BLOCK_N,
    CLUSTER,
    LINE,
    STAGE_BYTES,
    STAGES,
    beats_torch,
    schedule_tiles,
)
from minisgl.kernel.gemm.quantized_tiling import GemmTiling, choose_fp8_tiling, fp8_stage_bytes, sums_bytes
from minisgl.kernel.launch.compile import Compiler, tensor_map
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.optional_packages import import_error
from minisgl.quantization.levels import LevelFormat, Levels

_MAX_SIZE = 1 << 15  # columns of a row that a block quantizes
_GROUPS = 16  # groups of GROUP columns that a block of quantize_groups.cu has at a time
_GROUP_BLOCKS = 8  # blocks of quantize_groups.cu per multiprocessor
_PERSISTENT_THREADS = 512  # per block of fp8_persistent_gemm.cu


class Fp8Matrix(NamedTuple):
    """A weight in e4m3 as it is stored, and its scales."""

    codes: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N], or of blocks [N / 128, K / 128]
    group: int  # 0 or 128
    gated: bool
    x_scale: float = 0.0  # scale of all rows of x; 0: each row has its own


class _Kernel(NamedTuple):
    dtype: torch.dtype
    group: int
    gate: Activation | None
    tiling: GemmTiling


def fp8_matrix(levels: Levels, *, gated: bool) -> Fp8Matrix | None:
    """Return levels of fp8 as the products read them; None if rows of one block have different scales."""
    scales = levels.scales.flatten()
    if levels.format.group:
        blocks = levels.scales.view(-1, GROUP, levels.scales.shape[1])
        if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            return None
        scales = levels.scales[::GROUP].contiguous()
    form = levels.format
    return Fp8Matrix(levels.codes.view(torch.float8_e4m3fn), scales, form.group, gated, form.x_scale)


class Fp8Gemm:
    """Compiles the kernels once for each kind of product that is asked for."""

    def __init__(self, compiler: Compiler, device: torch.device) -> None:
        self._compiler = compiler
        self._row_scaled = _sglang_product()
        # Counters of the warpgroups of blocks with divided tiles; each launch leaves zeros.
        self._counters = torch.zeros(3 * compiler.num_sms, dtype=torch.int32, device=device)

    def begin_compiling(self, weight: Fp8Matrix, dtype: torch.dtype) -> None:
        """Begin to compile the products with a weight; for a gated weight, its products with silu."""
        gate: Activation | None = "silu" if weight.gated else None
        size = weight.codes.shape[1]
        specs = [_quantize_spec(dtype, dtype, weight.group, size)]
        if not weight.gated:
            specs.append(_quantize_groups_spec(dtype) if weight.group else _quantize_spec(dtype, None, 0, size))
        tilings = {
            self._tiling(rows, weight, before_attention=before_attention)
            for rows in (8, 16, 32, 64, 128, 256)
            for before_attention in {False, not weight.gated}
        }
        specs += [_product_spec(_Kernel(dtype, weight.group, gate, tiling)) for tiling in tilings]
        if weight.group:
            specs.append(_persistent_spec(dtype, gate))
        self._compiler.begin(specs)

    def library(self, weight: Fp8Matrix) -> str:
        """Return the name of the library or kernel that multiplies many rows with this weight."""
        if weight.group:
            return "csrc/fp8_persistent_gemm.cu or torch._scaled_mm"
        return "torch._scaled_mm" if self._row_scaled is None else "sglang-kernel"

    def quantize(self, x: Tensor, norm: Norm | None, group: int, *, x_scale: float = 0.0) -> Fp8Rows:
        """Return norm(x), [M, K], in e4m3, with scales for rows or for `group` of their columns, or with `x_scale`."""
        rows, size = x.shape
        made = empty_rows(rows, size, group, x.device)
        if group and norm is None:
            blocks = min(-(-rows * size // (GROUP * _GROUPS)), _GROUP_BLOCKS * self._compiler.num_sms)
            kernel = self._compiler.kernel(_quantize_groups_spec, x.dtype)
            kernel((blocks,), _GROUPS * 16, x=x, codes=made.codes, scales=made.scales, stride=made.room, M=rows, K=size)
            return made
        norm_dtype = None if norm is None else norm.weight.dtype
        kernel = self._compiler.kernel(_quantize_spec, x.dtype, norm_dtype, group, size)
        kernel(
            (rows,),
            _quantize_threads(size)[0],
            x=x,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            codes=made.codes,
            scales=made.scales,
            fixed=x_scale,
            stride=made.room,
            K=size,
        )
        return made

    def supports(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        """Return True if products in this dtype round x and read such a weight [width, size] as it is."""
        return (
            self._compiler.arch == 90
            and form.kind == "fp8"
            and form.rounds_x
            and form.group in ((0,) if form.x_scale else (0, GROUP))
            and dtype == torch.bfloat16
            and size % LINE == 0
            and size <= _MAX_SIZE
            and width % (GROUP if form.group else 16) == 0
        )

    def applies_gate(self, rows: int, weight: Fp8Matrix) -> bool:
        """Return True if the product of so many rows with this weight takes a `gate`."""
        return weight.gated and (rows <= MOST_ROWS[weight.group] or self._persists(rows, weight, launches=1))

    def linear(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: Fp8Matrix,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        gate: Activation | None = None,
        before_attention: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return norm(x) @ weight^T + bias + residual, or its `gate`d form, with x rounded to FP8."""
        if len(x) == 0:
            width = len(weight.codes)
            return x.new_empty((0, width if gate is None else width // 2))
        rounded = self.quantize(x, norm, weight.group, x_scale=weight.x_scale)
        return self.product(
            rounded, weight, bias, residual, x.dtype, gate=gate, before_attention=before_attention, out=out
        )

    def product(
        self,
        x: Fp8Rows,
        weight: Fp8Matrix,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        *,
        gate: Activation | None = None,
        before_attention: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ weight^T + bias + residual [rows, N], or its `gate`d form [rows, N / 2], where `applies_gate`."""
        if x.rows > MOST_ROWS[weight.group]:
            launches = sum(each is not None for each in (bias, residual, out))
            if gate is not None or self._persists(x.rows, weight, launches=launches):
                return self.persistent_product(x, weight, bias, residual, dtype, gate=gate, out=out)
            y = self._library_product(x, weight, dtype)
            if bias is not None:
                y.add_(bias)
            if residual is not None:
                y.add_(residual)
            return y if out is None else out.copy_(y)
        width, size = weight.codes.shape
        if out is None:
            out = _empty_output(x, weight, dtype, gate)
        tiling = self._tiling(x.rows, weight, before_attention=before_attention)
        kernel = self._compiler.kernel(_product_spec, _Kernel(dtype, weight.group, gate, tiling))
        x_rows = tiling.x_rows(x.rows)
        if gate is None:
            w_map = tensor_map(weight.codes, tiling.block_n, LINE)
        else:
            groups = weight.codes.view(torch.uint8).view(2, width // 16, 8, size).transpose(0, 1)
            w_map = tensor_map(groups, tiling.block_n // 16, 2, 8, LINE)
        kernel(
            (1, -(-x.rows // tiling.max_rows), -(-width // tiling.block_n)),
            tiling.threads,
            x_map=tensor_map(x.codes[: x.rows], x_rows, LINE),
            w_map=w_map,
            **_arguments(x, weight, bias, residual, out),
            x_rows=x_rows,
            cluster=tiling.split,
        )
        return out

    def persistent_product(
        self,
        x: Fp8Rows,
        weight: Fp8Matrix,
        bias: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        *,
        gate: Activation | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute `product` of more than 128 rows, with scales of blocks, by csrc/fp8_persistent_gemm.cu."""
        width, size = weight.codes.shape
        if out is None:
            out = _empty_output(x, weight, dtype, gate)
        schedule = schedule_tiles(x.rows, width, size, self._compiler.num_sms)
        floats = schedule.partial_floats
        kernel = self._compiler.kernel(_persistent_spec, dtype, gate)
        kernel(
            (schedule.clusters,),
            _PERSISTENT_THREADS,
            x_map=tensor_map(x.codes[: x.rows], schedule.x_rows // CLUSTER, LINE),
            w_map=tensor_map(weight.codes, BLOCK_N // 2, LINE),
            **_arguments(x, weight, bias, residual, out),
            partial=torch.empty(floats, dtype=torch.float32, device=out.device) if floats else None,
            counters=self._counters,
            x_rows=schedule.x_rows,
            whole=schedule.whole,
            splits=schedule.splits,
            cluster=CLUSTER,
        )
        return out

    def _library_product(self, x: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype) -> Tensor:
        """[rows, N] of many rows, by the faster library that there is."""
        if weight.group:
            scales = x.scales.t(), weight.scales.t()
        elif self._row_scaled is not None:
            return self._row_scaled(x.codes[: x.rows], weight.codes.t(), x.scales[: x.rows], weight.scales, dtype)
        else:
            scales = x.scales.unsqueeze(1), weight.scales.unsqueeze(0)
        y = torch._scaled_mm(x.codes, weight.codes.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
        return y[: x.rows]

    def _persists(self, rows: int, weight: Fp8Matrix, *, launches: int) -> bool:
        """Return True if csrc/fp8_persistent_gemm.cu multiplies so many rows, more than fp8_gemm.cu does."""
        sms = self._compiler.num_sms
        return weight.group > 0 and beats_torch(rows, *weight.codes.shape, sms, launches=launches)

    def _tiling(self, rows: int, weight: Fp8Matrix, *, before_attention: bool = False) -> GemmTiling:
        sms = self._compiler.num_sms
        return choose_fp8_tiling(rows, *weight.codes.shape, weight.group, sms, before_attention=before_attention)


def _empty_output(x: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype, gate: Activation | None) -> Tensor:
    width = len(weight.codes)
    return torch.empty((x.rows, width if gate is None else width // 2), dtype=dtype, device=x.codes.device)


def _arguments(
    x: Fp8Rows, weight: Fp8Matrix, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> dict[str, Any]:
    """Return the arguments that fp8_gemm.cu and fp8_persistent_gemm.cu share."""
    width, size = weight.codes.shape
    shared = {"x_scales": x.scales, "x_stride": x.room, "w_scales": weight.scales}
    return shared | {"bias": bias, "residual": residual, "out": out, "M": x.rows, "N": width, "K": size}


def _sglang_product() -> Callable[..., Tensor] | None:
    """Return sglang-kernel's product with row scales, if the package is installed; it is faster than torch's."""
    if import_error("sgl_kernel", "sglang-kernel") is not None:
        return None
    from sgl_kernel import fp8_scaled_mm

    return cast("Callable[..., Tensor]", fp8_scaled_mm)


def _quantize_threads(size: int) -> tuple[int, int]:
    """Return the threads of a row of so many columns, and the turns of 8 columns each in which all of them work."""
    turns = -(-size // 8 // (1024 if size > 16384 else 512))
    return -(-size // 8 // turns // 32) * 32, turns


def _quantize_spec(dtype: torch.dtype, norm_dtype: torch.dtype | None, group: int, size: int) -> KernelSpec:
    threads, turns = _quantize_threads(size)
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[dtype],
        "NORM_SCALAR": SCALAR_NAMES[norm_dtype or dtype],
        "NORMED": int(norm_dtype is not None),
        "GROUP": group,
        "THREADS": threads,
        "TURNS": turns,
    }
    return KernelSpec("quantize.cu", "quantize", macros)


def _quantize_groups_spec(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec("quantize_groups.cu", "quantize_groups", {"SCALAR": SCALAR_NAMES[dtype]})


def _persistent_spec(dtype: torch.dtype, gate: Activation | None) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[dtype],
        "GATED": int(gate is not None),
        "GELU_TANH": int(gate == "gelu_tanh"),
        "STAGES": STAGES,
    }
    return KernelSpec("fp8_persistent_gemm.cu", "fp8_persistent_gemm", macros, STAGES * STAGE_BYTES)


def _product_spec(kind: _Kernel) -> KernelSpec:
    tiling = kind.tiling
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[kind.dtype],
        "GROUP": kind.group,
        "GATED": int(kind.gate is not None),
        "GELU_TANH": int(kind.gate == "gelu_tanh"),
        **tiling.macros,
    }
    shared_bytes = max(tiling.stages * fp8_stage_bytes(kind.group, tiling), sums_bytes(tiling))
    return KernelSpec("fp8_gemm.cu", "fp8_gemm", macros, shared_bytes, tiling.sm_shared_bytes)

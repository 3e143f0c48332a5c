"""One token a row through a Gated DeltaNet, by the kernels of delta_net.cu."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from minisgl.kernel.base import DeltaHeads
from minisgl.kernel.compile import Compiler
from minisgl.kernel.recurrent_rows import SingleRows
from minisgl.kernel.signature import SCALAR_NAMES, KernelSpec

_HEAD_DIM = 128  # of keys and values in all published models
_THREADS = 256  # for a value head's memory of 64 KiB, which their registers hold


class CudaDelta:
    """Launches both kernels."""

    def __init__(self, compiler: Compiler, threads: int = _THREADS) -> None:
        self._compiler = compiler
        self._threads = threads

    def begin_compiling(self, dtype: torch.dtype, taps: Iterable[int]) -> None:
        """Begin to compile, in threads, for heads of the usual size."""
        self._compiler.begin(_spec("delta_step", dtype, each, self._threads) for each in taps)

    def supports(self, projected: Tensor, heads: DeltaHeads, inputs: Tensor) -> bool:
        """Return True if the kernels can take a step of these heads."""
        alike = projected.dtype == inputs.dtype == heads.norm.weight.dtype
        return (
            alike
            and projected.dtype in SCALAR_NAMES
            and projected.is_contiguous()
            and heads.key_dim == heads.value_dim == _HEAD_DIM
            and len(projected) > 0
        )

    def __call__(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: SingleRows
    ) -> Tensor:
        count, width = projected.shape
        mixed = torch.empty((count, heads.channels), dtype=torch.float32, device=projected.device)
        out = projected.new_empty((count, heads.num_value_heads * heads.value_dim))
        taps = len(heads.conv)
        conv, step = (
            self._compiler.kernel(_spec, name, projected.dtype, taps, self._threads)
            for name in ("delta_conv", "delta_step")
        )
        conv(
            (2 * heads.num_key_heads + heads.num_value_heads, count),
            _HEAD_DIM,
            projected=projected,
            inputs=inputs,
            conv=heads.conv,
            slots=rows.slots,
            positions=rows.positions,
            mixed=mixed,
            key_heads=heads.num_key_heads,
            value_heads=heads.num_value_heads,
            width=width,
        )
        step(
            (heads.num_value_heads, count),
            self._threads,
            projected=projected,
            mixed=mixed,
            memory=memory,
            a_log=heads.a_log,
            dt_bias=heads.dt_bias,
            norm_weight=heads.norm.weight,
            slots=rows.slots,
            positions=rows.positions,
            out=out,
            key_heads=heads.num_key_heads,
            value_heads=heads.num_value_heads,
            width=width,
            eps=heads.norm.eps,
        )
        return out


def _spec(name: str, dtype: torch.dtype, taps: int, threads: int) -> KernelSpec:
    macros: dict[str, str | int] = {
        "SCALAR": SCALAR_NAMES[dtype],
        "KEY_DIM": _HEAD_DIM,
        "VALUE_DIM": _HEAD_DIM,
        "TAPS": taps,
        "THREADS": threads,
    }
    return KernelSpec("delta_net.cu", name, macros)

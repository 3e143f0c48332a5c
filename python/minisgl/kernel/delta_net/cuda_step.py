"""Gated DeltaNet for rows of one token: csrc/delta_net.cu."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from minisgl.kernel.base import DeltaHeads
from minisgl.kernel.delta_net.recurrent_rows import SingleRows
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec

_HEAD_DIM = 128  # size of key and value heads in all published models
_THREADS = 256  # per block, whose registers hold a value head's memory of 64 KiB
_WAVES = 4  # blocks per multiprocessor, if blocks take rows in turn


class CudaDeltaStep:
    """Launches both kernels."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def begin_compiling(self, dtype: torch.dtype, taps: Iterable[int]) -> None:
        """Begin to compile, in threads, for heads of the usual size."""
        self._compiler.begin(_spec("delta_step", dtype, each) for each in taps)

    def supports(self, heads: DeltaHeads, dtype: torch.dtype) -> bool:
        """Return True if the kernels can take a step of these heads."""
        alike = heads.norm.weight.dtype == dtype in SCALAR_NAMES
        return alike and heads.key_dim == heads.value_dim == _HEAD_DIM

    def __call__(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: SingleRows, out: Tensor
    ) -> None:
        """Compute Ops.delta_step."""
        (tokens, width), count, taps = projected.shape, len(rows.slots), len(heads.conv)
        mixed = torch.empty((tokens, heads.channels), dtype=torch.float32, device=projected.device)
        conv, step = (
            self._compiler.kernel(_spec, name, projected.dtype, taps) for name in ("delta_conv", "delta_step")
        )
        conv(
            (2 * heads.num_key_heads + heads.num_value_heads, count),
            _HEAD_DIM,
            projected=projected,
            inputs=inputs,
            conv=heads.conv,
            slots=rows.slots,
            positions=rows.positions,
            tokens=rows.tokens,
            lengths=rows.lengths,
            mixed=mixed,
            key_heads=heads.num_key_heads,
            value_heads=heads.num_value_heads,
            width=width,
        )
        # If only the device knows the number of rows, a few waves of blocks suffice.
        in_turn = -(-_WAVES * self._compiler.num_sms // heads.num_value_heads)
        step(
            (heads.num_value_heads, count if rows.lengths is None else min(count, in_turn)),
            _THREADS,
            projected=projected,
            mixed=mixed,
            memory=memory,
            a_log=heads.a_log,
            dt_bias=heads.dt_bias,
            norm_weight=heads.norm.weight,
            slots=rows.slots,
            positions=rows.positions,
            tokens=rows.tokens,
            lengths=rows.lengths,
            out=out,
            rows=count,
            key_heads=heads.num_key_heads,
            value_heads=heads.num_value_heads,
            width=width,
            eps=heads.norm.eps,
        )


def _spec(name: str, dtype: torch.dtype, taps: int) -> KernelSpec:
    macros: dict[str, str | int] = {
        "SCALAR": SCALAR_NAMES[dtype],
        "KEY_DIM": _HEAD_DIM,
        "VALUE_DIM": _HEAD_DIM,
        "TAPS": taps,
        "THREADS": _THREADS,
    }
    return KernelSpec("delta_net.cu", name, macros)

"""Gated DeltaNet for rows of several tokens: three kernels of csrc/ (delta_chunks.cuh)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.base import DeltaHeads
from minisgl.kernel.delta_net.recurrent_rows import CHUNK, ChunkedRows
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Macros

_HEAD_DIM = 128  # size of key and value heads in all published models
_PADDING = 8  # 16-bit values of padding after each row of a tile in shared memory
_PREPARE_THREADS = 128
_GATE_WARPS = 8
_COLUMNS = 16  # columns of a memory that each warp of delta_scan holds
_SCAN_WARPS = 1, 2, 4  # warps of a block of delta_scan that compute
_LOADER_WARPS = 4  # warps of a block of delta_scan that load
_WAVES = 4  # blocks per multiprocessor, if blocks take rows in turn
_PARTS = {torch.bfloat16: 1, torch.float16: 2}  # bf16 parts of operands that only the output depends on


class CudaDeltaChunks:
    """Launches the three kernels: delta_prepare on all chunks in parallel, delta_scan on each row's chunks in order,
    and delta_gate for norm and gate."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def begin_compiling(self, dtype: torch.dtype, taps: Iterable[int]) -> None:
        """Begin to compile, in threads, for heads of the usual size."""
        if dtype in _PARTS:
            for each in taps:
                scans = (_scan_spec(dtype, each, warps) for warps in _SCAN_WARPS)
                self._compiler.begin([_prepare_spec(dtype, each), *scans, _gate_spec(dtype)])

    def supports(self, heads: DeltaHeads, dtype: torch.dtype) -> bool:
        """Return True if the kernels can take rows of these heads."""
        return (
            heads.norm.weight.dtype == dtype in _PARTS
            and heads.num_value_heads % 2 == 0  # rows of a projection are read 8 bytes at a time
            and heads.key_dim == heads.value_dim == _HEAD_DIM
            and _scan_bytes(dtype, min(_SCAN_WARPS)) <= self._compiler.block_shared_bytes
        )

    def __call__(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: ChunkedRows, out: Tensor
    ) -> None:
        """Compute Ops.delta_chunks."""
        (tokens, width), dtype = projected.shape, projected.dtype
        key_heads, value_heads, parts = heads.num_key_heads, heads.num_value_heads, _PARTS[dtype]

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=projected.device)

        sizes = {"key_heads": key_heads, "value_heads": value_heads, "width": width}
        values = make(tokens, value_heads, _HEAD_DIM, dtype=torch.float32)
        # Tensors that delta_prepare writes and delta_scan reads, and the rows that both read.
        chunked: dict[str, Any] = {
            "projected": projected,
            "inputs": inputs,
            "slots": rows.slots,
            "positions": rows.positions,
            "begins": rows.begins,
            "lengths": rows.lengths,
            "keys": make(2, tokens, key_heads, _HEAD_DIM),
            "queries": make(parts, tokens, key_heads, _HEAD_DIM),
            "values": values,
            "solve": make(2, tokens, value_heads, CHUNK),
            "scores": make(parts, tokens, value_heads, CHUNK),
            "gates": make(tokens, value_heads, 4, dtype=torch.float32),
            "tokens": tokens,
            **sizes,
        }
        self._prepare(heads, rows, dtype, chunked)
        self._scan(heads, rows, dtype, chunked, memory)
        count = len(rows.tokens)
        gate = self._compiler.kernel(_gate_spec, dtype)
        gate(
            (-(-count * value_heads // _GATE_WARPS),),
            32 * _GATE_WARPS,
            projected=projected,
            reads=values,
            norm_weight=heads.norm.weight,
            chunk_tokens=rows.tokens,
            out=out,
            n=count,
            **sizes,
            eps=heads.norm.eps,
            early=False,
        )

    def _prepare(self, heads: DeltaHeads, rows: ChunkedRows, dtype: torch.dtype, chunked: Mapping[str, Any]) -> None:
        """Launch the part of the work that does not depend on the memory, for all chunks in parallel."""
        prepare, num_chunks = self._compiler.kernel(_prepare_spec, dtype, len(heads.conv)), len(rows.chunk_rows)
        prepare(
            (heads.num_key_heads, self._in_turn(rows, num_chunks, heads.num_key_heads)),
            _PREPARE_THREADS,
            conv=heads.conv,
            a_log=heads.a_log,
            dt_bias=heads.dt_bias,
            chunk_rows=rows.chunk_rows,
            chunk_firsts=rows.chunk_firsts,
            chunks=num_chunks,
            **chunked,
            early=False,
        )

    def _scan(
        self, heads: DeltaHeads, rows: ChunkedRows, dtype: torch.dtype, chunked: Mapping[str, Any], memory: Tensor
    ) -> None:
        """Launch the recurrence over the chunks of each row, which reads and updates the memory."""
        warps = self._scan_warps(dtype, heads.num_value_heads * len(rows.slots))
        blocks = heads.num_value_heads * _HEAD_DIM // (_COLUMNS * warps)
        scan = self._compiler.kernel(_scan_spec, dtype, len(heads.conv), warps)
        scan(
            (blocks, self._in_turn(rows, len(rows.slots), blocks)),
            32 * (warps + _LOADER_WARPS),
            memory=memory,
            rows=len(rows.slots),
            **chunked,
            early=False,
        )

    def _in_turn(self, rows: ChunkedRows, most: int, blocks: int) -> int:
        """Return the grid's second dimension for at most `most` rows or chunks, each of which takes `blocks` blocks.

        In a CUDA graph `most` is far above the usual number; a few waves of blocks, which take rows in turn, suffice.
        """
        return most if rows.padded is not None else min(most, -(-_WAVES * self._compiler.num_sms // blocks))

    def _scan_warps(self, dtype: torch.dtype, memories: int) -> int:
        """Return the number of computing warps per block for `memories` rows times heads. Fewer warps make more blocks,
        which fill the GPU but read more in total.
        """
        most = max(_SCAN_WARPS) if memories > self._compiler.num_sms // 8 else 2
        fitting = (warps for warps in _SCAN_WARPS if _scan_bytes(dtype, warps) <= self._compiler.block_shared_bytes)
        return max(warps for warps in fitting if warps <= most)


def _macros(dtype: torch.dtype) -> Macros:
    return {"SCALAR": SCALAR_NAMES[dtype], "KEY_DIM": _HEAD_DIM, "VALUE_DIM": _HEAD_DIM}


def _prepare_spec(dtype: torch.dtype, taps: int) -> KernelSpec:
    bf16_values = (2 + _PARTS[dtype]) * (_HEAD_DIM + _PADDING)
    floats = 20 + 2  # the diagonal's blocks; running sums and steps
    shared = CHUNK * (2 * bf16_values + 4 * floats) + 16
    return KernelSpec("delta_prepare.cu", "delta_prepare", {**_macros(dtype), "TAPS": taps}, shared_bytes=shared)


def _scan_spec(dtype: torch.dtype, taps: int, warps: int) -> KernelSpec:
    macros = {**_macros(dtype), "TAPS": taps, "SCAN_WARPS": warps}
    return KernelSpec("delta_scan.cu", "delta_scan", macros, shared_bytes=_scan_bytes(dtype, warps))


def _gate_spec(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec("delta_gate.cu", "delta_gate", _macros(dtype))


def _scan_bytes(dtype: torch.dtype, warps: int) -> int:
    """Return the shared memory of a block of delta_scan: two stages, of one chunk each."""
    bf16_values = (2 + _PARTS[dtype]) * (_HEAD_DIM + _PADDING + CHUNK + _PADDING)
    floats = _COLUMNS * warps + 4 + 4  # values and gates
    return 2 * CHUNK * (2 * bf16_values + 4 * floats)

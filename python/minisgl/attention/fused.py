"""Fused decode attention: norm, rotation, store and attention in one launch (csrc/decode_attention.cu, from Hopper on).

It replaces `Ops.norm_rope_store` and the attention backend in steps that have only decodes. It reads slots, lengths and
the page table in place, so nothing is planned, gathered or sent for it. A row's result depends only on the row itself
and on the number of rows of the step (or of its graph), not on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import AttentionSpec
from minisgl.attention.decode_splits import VALUE_DIM, DecodeKernel, DecodeSplits, decode_splits
from minisgl.kernel.base import Heads
from minisgl.kernel.gemm.fp8_rows import GROUP, Fp8Rows, empty_rows
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import MAX_EARLY_ROWS, SCALAR_NAMES, KernelSpec, Macros

_MAX_CLUSTER = 8  # blocks of a cluster, on every GPU that has clusters
_TILE = 16  # tokens of a tile, as in decode_attention.cu
_FAST_MEMORY = 30e9  # bytes a second for each multiprocessor, between an H100 (25) and an H200 (37)
_MAX_SPLITS = 64  # per row, since one cluster merges them
_RECORDS = 1 << 14  # partial results of splits for which there is memory
_NEVER = (1 << 30) - 1  # more tiles than any row has: no row is split


class FusedDecode:
    """Compiles the kernels of a model's layers; `rows` binds them to a step.

    All layers keep partial results of splits in one buffer, so only one stream may use an instance.
    """

    def __init__(self, specs: Iterable[AttentionSpec], device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._specs = tuple(specs)
        about = torch.cuda.get_device_properties(device)
        self._num_sms = about.multi_processor_count
        # Memory makes two transfers a cycle; the clock is in kHz, the bus width in bits.
        bytes_per_second = 2 * about.memory_clock_rate * 1000 * about.memory_bus_width / 8
        self._slow_memory = bytes_per_second / self._num_sms < _FAST_MEMORY
        floats = max(spec.group * (min(spec.head_dim, VALUE_DIM) + 2 * _MAX_CLUSTER) for spec in self._specs)
        self._records = torch.empty(_RECORDS, floats, dtype=torch.float32, device=device)
        self._counters = torch.zeros(2 * _RECORDS, dtype=torch.int32, device=device)

    def begin_compiling(self, max_rows: int, *, rounded: bool = False) -> None:
        """Compile the kernels of steps of up to so many rows in threads; any other is compiled when it is needed.

        `rounded`: the kernels of `FusedRows.forward_rounded`.
        """
        steps = ((spec, self._splits_of(spec, rows)) for spec in self._specs for rows in range(1, max_rows + 1))
        expected = {(spec, splits.kernel) for spec, splits in steps if not rounded or _rounds(spec, splits)}
        self._compiler.begin(_kernel_spec(spec, kernel, rounded) for spec, kernel in expected)

    def rows(self, spec: AttentionSpec, slots: Tensor, kv_lens: Tensor, page_table: Tensor) -> FusedRows:
        """Bind the kernel of one of the specs to B rows, in the layers that have it.

        slots [B] int64 and kv_lens [B] int32, page_table [slots, pages] int32 of all slots.
        """
        splits = self._splits_of(spec, len(slots))
        return FusedRows(
            compiler=self._compiler,
            spec=spec,
            splits=splits,
            records=self._records,
            counters=self._counters,
            slots=slots,
            kv_lens=kv_lens,
            page_table=page_table,
        )

    def _splits_of(self, spec: AttentionSpec, rows: int) -> DecodeSplits:
        spills = not spec.fp8_kv and (spec.page_size < _TILE or spec.group == 1)
        return decode_splits(
            rows * spec.num_kv_heads * _parts(spec.head_dim),
            self._num_sms,
            spec.head_dim,
            spills=spills,
            fp8=spec.fp8_kv,
            slow_memory=self._slow_memory,
        )


def _parts(head_dim: int) -> int:
    """Return the number of clusters that divide the dimensions of a KV head."""
    return -(-head_dim // VALUE_DIM)


def _rounds(spec: AttentionSpec, splits: DecodeSplits) -> bool:
    """Return True if each block merges whole heads, which are groups of 128 columns with one FP8 scale."""
    return spec.head_dim == GROUP and spec.group % splits.cluster == 0


def _kernel_spec(spec: AttentionSpec, kernel: DecodeKernel, rounded: bool) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[spec.dtype],
        "CACHE": SCALAR_NAMES[spec.kv_dtype],
        "NORM_SCALAR": SCALAR_NAMES[spec.norm_dtype or spec.dtype],
        "HEAD_DIM": spec.head_dim,
        "GROUP": spec.group,
        "PAGE_SIZE": spec.page_size,
        "STORES": int(spec.stores_kv),
        "CLUSTER": kernel.cluster,
        "WARPS": kernel.warps,
        "BLOCKS_OF_SM": kernel.blocks_of_sm,
        "SPARES_FIRST": int(kernel.spares_first),
        "FAIR": int(kernel.fair),
        "ROUNDED": int(rounded),
    }
    return KernelSpec("decode_attention.cu", "decode_attention", macros)


@dataclass(frozen=True, slots=True, eq=False)
class FusedRows:
    """Fused decode attention for one step's rows, in the layers of one spec."""

    compiler: Compiler
    spec: AttentionSpec
    splits: DecodeSplits
    records: Tensor
    counters: Tensor
    slots: Tensor  # [B] int64
    kv_lens: Tensor  # [B] int32
    page_table: Tensor  # [slots, pages] int32

    def forward(
        self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store k and v of qkv [B, (heads + 2 * kv_heads) * head_dim], and attend: [B, heads, head_dim].

        For layers that attend to K and V of another layer, qkv is q [B, heads * head_dim]. `sinks` [heads]: as in
        `AttentionPlan.forward`.
        """
        out = qkv.new_empty((len(qkv), heads.num_heads, k_cache.shape[-1]))
        self._launch(qkv, heads, k_cache, v_cache, sinks, out=out)
        return out

    @property
    def rounds(self) -> bool:
        """True if the kernel can round its output to FP8."""
        return _rounds(self.spec, self.splits)

    def forward_rounded(
        self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None = None
    ) -> Fp8Rows:
        """Do as `forward`, but return [B, heads * head_dim] in FP8 with groups of 128 columns; only if `rounds`."""
        rounded = empty_rows(len(qkv), heads.num_heads * GROUP, GROUP, qkv.device)
        self._launch(qkv, heads, k_cache, v_cache, sinks, rounded=rounded)
        return rounded

    def _launch(
        self,
        qkv: Tensor,
        heads: Heads,
        k_cache: Tensor,
        v_cache: Tensor,
        sinks: Tensor | None,
        out: Tensor | None = None,
        rounded: Fp8Rows | None = None,
    ) -> None:
        """Write the result to `out`, or in FP8 to `rounded`."""
        splits, spec, rows = self.splits, self.spec, len(qkv)
        num_kv_heads, head_dim = k_cache.shape[-2:]
        parts = num_kv_heads * _parts(head_dim)  # clusters of a row that is not split
        units = rows * parts
        max_splits = max(1, min(_RECORDS // units, _MAX_SPLITS))
        longest = _NEVER if spec.window is None else spec.window // _TILE + 2  # most tiles that a row reads
        # A window of as many tokens as a row that is not cut covers one tile more, or two: it is not cut either.
        cuts = max_splits > 1 and longest > 2 * splits.min_tiles + 2
        spare = max(splits.spare_clusters // parts, 1) if cuts else 0  # clusters for each part
        self.compiler.kernel(_kernel_spec, spec, splits.kernel, rounded is not None)(
            (1, parts, rows + spare),
            splits.warps * 32,
            qkv=qkv,
            slots=self.slots,
            lengths=self.kv_lens,
            page_table=self.page_table,
            table_stride=self.page_table.stride(0),
            rows=rows,
            cos_sin=heads.cos_sin,
            q_norm=None if heads.q_norm is None else heads.q_norm.weight,
            k_norm=None if heads.k_norm is None else heads.k_norm.weight,
            eps=0.0 if heads.q_norm is None else heads.q_norm.eps,
            v_eps=-1.0 if heads.v_eps is None else heads.v_eps,
            k_cache=k_cache,
            v_cache=v_cache,
            sinks=sinks,
            out=out,
            codes=None if rounded is None else rounded.codes,
            scales=None if rounded is None else rounded.scales,
            scales_stride=0 if rounded is None else rounded.room,
            softmax_scale=spec.softmax_scale,
            window=spec.window or 0,
            num_kv_splits=splits.num_kv_splits,
            min_tiles=splits.min_tiles if cuts else _NEVER,
            max_tiles=splits.max_tiles,
            max_splits=max_splits,
            records=self.records,
            counters=self.counters,
            cluster=splits.cluster,
            early=rows <= MAX_EARLY_ROWS,
        )

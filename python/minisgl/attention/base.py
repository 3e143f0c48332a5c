"""Interface of attention backends. A new one is a file with these classes, named in `backend_choice` and `config`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from minisgl.core import Int32Array
from minisgl.kernel.base import LatentDims
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import Store, paged_kv
from minisgl.layers.layer_config import AttentionConfig, DeltaNetConfig


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer as one rank computes it, and the pages that it reads.

    Backends are chosen by it. A cap on scores becomes a field here with the first model that has one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # type of q and of the output
    window: int | None = None  # positions that a query attends to, its own included; None: all before it
    fp8_kv: bool = False  # K and V are stored as float8_e4m3fn
    norm_dtype: torch.dtype | None = None  # type of the norm weights of q and k, if any; None: dtype
    scale: float | None = None  # factor of q @ k; None: head_dim ** -0.5
    has_sinks: bool = False  # each head's softmax has one more score; `AttentionPlan.forward` takes it
    latent: LatentDims | None = None  # MLA: a key is a latent and its rope, its value the latent; None: V is stored too
    stores_kv: bool = True  # False: the layer attends to K and V that another layer stores

    @classmethod
    def of(
        cls,
        config: AttentionConfig,
        *,
        tp_size: int,
        page_size: int,
        dtype: torch.dtype,
        norm_dtype: torch.dtype | None = None,
        fp8_kv: bool = False,
    ) -> AttentionSpec:
        """Return the spec of a layer on each of `tp_size` ranks."""
        return cls(
            num_heads=config.heads_per_rank(tp_size),
            num_kv_heads=config.kv_heads_per_rank(tp_size),
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=dtype,
            window=config.window,
            fp8_kv=fp8_kv,
            norm_dtype=norm_dtype,
            scale=config.scale,
            has_sinks=config.has_sinks,
            latent=None if config.latent is None else config.latent.dims,
            stores_kv=config.kv_of is None,
        )

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """Factor of q @ k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of the pool."""
        return torch.float8_e4m3fn if self.fp8_kv else self.dtype

    def kv_stores(self, dtype: torch.dtype | None = None) -> tuple[Store, ...]:
        """Return the stores of the layer's tokens, in `kv_dtype` or another dtype: K and V, or one latent for both."""
        stores = paged_kv(self.num_kv_heads, self.head_dim, dtype or self.kv_dtype)
        return stores if self.latent is None else stores[:1]


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """State of fixed size that a layer without attention keeps for each slot on one rank."""

    stores: tuple[Store, ...]
    history: int  # inputs before a token that the layer's convolution reads

    @classmethod
    def of(cls, config: DeltaNetConfig, *, tp_size: int, dtype: torch.dtype) -> RecurrentSpec:
        """Return the stores of the convolution's last inputs, and of the float32 memory of each value head."""
        history = config.conv_size - 1
        inputs = (history, config.channels_per_rank(tp_size))
        memory = (config.num_value_heads // tp_size, config.key_dim, config.value_dim)
        return cls((Store(inputs, dtype, per="slot"), Store(memory, torch.float32, per="slot")), history)


LayerSpec: TypeAlias = AttentionSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of attention for the rows of one step: row i's queries are its last `query_lens[i]` positions.

    `query_lens` and `kv_lens` are host copies of the tensors' values, so that planning needs no synchronization.
    """

    query_lens: Int32Array  # [rows] host: new tokens of each row
    kv_lens: Int32Array  # [rows] host: tokens of each row in the cache after this step's are written
    query_starts: Tensor  # [rows + 1] int32: prefix sums of query_lens
    kv_lens_device: Tensor  # [rows] int32
    page_table: Tensor  # [rows, max_pages] int32: page of each block of page_size positions
    # Number of tokens in a CUDA graph of prefills, where the host's lengths are only upper bounds; else None.
    graph_tokens: int | None = None
    window_table: Tensor | None = None  # page table of the windowed group, if there is one

    def of_layer(self, spec: AttentionSpec) -> AttentionInputs:
        """Return the inputs with the page table of the layer's group, whose entries before the window are stale."""
        if self.window_table is None or spec.window is None:
            return self
        return replace(self, page_table=self.window_table, window_table=None)


class AttentionPlan(Protocol):
    """One step's attention in the layers of one spec, made by their backend's `plan`."""

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:
        """Attend with q [T, heads, head_dim] to the layer's pages; return [T, heads, head_dim, or the latent's rank].

        A query at position i attends to the positions j <= i; if the spec has a window, only to j > i - window.
        `sinks` [heads], if the spec has them: one more score per head, whose value is 0. K and V of the step's own
        tokens are already stored.
        """


@dataclass(frozen=True, slots=True)
class AbsorbedTokens:
    """Tokens of a step with expanded keys that attend to the latents themselves."""

    tokens: Tensor  # [n] int64
    plan: AttentionPlan  # for their absorbed queries


@runtime_checkable
class ExpandingPlan(AttentionPlan, Protocol):
    """Plan of a step of latent attention that expands keys and values for most of its tokens."""

    @property
    def absorbed(self) -> AbsorbedTokens | None:
        """Tokens that attend to the latents themselves."""

    def forward_expanded(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, weight: Tensor, kv: KVPool, out: Tensor
    ) -> None:
        """Attend with q_nope [T, heads, nope_dim] and q_rope [T, heads, rope_dim], and write out [T, heads, value_dim].

        weight [heads, nope_dim + value_dim, rank] expands a latent to each head's key and value. The `absorbed` tokens
        are skipped.
        """


class GraphedDecode(Protocol):
    """A backend's part in one captured decode of a fixed number of rows, and in its replays.

    It exists for FlashInfer, which plans on the host. Two cases need FlashInfer, because no other backend captures
    them: decodes with a window on compute capability 8.x; and, on 10.x and later, decodes that fused decode does not
    support (more than 8 query heads per KV head, or a page size that is not a power of two).
    """

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Plan as `AttentionBackend.plan` does, once before the capture and once during it.

        Nothing on the host may depend on the lengths, because a replay finds other lengths in the tensors.
        """

    def prepare(self, positions: Int32Array) -> None:
        """Do the host's work for the next replay, for the position of each row's query, [rows or fewer].

        Missing rows at the end are padding rows of one token.
        """


class AttentionBackend(Protocol):
    """Causal attention of new queries over the paged KV pool, for the layers of one spec."""

    @property
    def graph_safe(self) -> bool:
        """True if a decode does the same work for all lengths, so that a CUDA graph can capture it."""

    @property
    def prefill_graph_safe(self) -> bool:
        """True if a CUDA graph can capture any step with its plan, even if some rows have no query."""

    @property
    def upcasts(self) -> bool:
        """True if FP8 pages must be upcast to `KVPool.upcast_buffer` before attention."""

    @property
    def reads_whole_pages(self) -> bool:
        """True if it reads the rest of a row's last page and masks it, so that NaN must not stand there."""

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Prepare a step, once for all layers of the spec."""


@runtime_checkable
class PlansDecodes(Protocol):
    """A backend whose `plan` cannot be captured; graphs use a `GraphedDecode` instead."""

    def graphed_decode(self, rows: int) -> GraphedDecode:
        """Return the `GraphedDecode` for this number of rows. The largest number is requested first."""


def window_left(window: int | None) -> int:
    """Positions that a query sees to its left, itself not counted; -1: all."""
    return -1 if window is None else window - 1


def shorter_window(window: int | None, inputs: AttentionInputs) -> int | None:
    """Return the window, or None if no row of the step is longer than it."""
    return None if window is None or window >= int(inputs.kv_lens.max()) else window


def add_sinks(attended: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add attention sinks (Xiao et al., 2023) to the output of a kernel without sinks, in place, and return it.

    A sink is a score of each head whose value is 0, so it enlarges the sum that the softmax divides by, from exp(lse)
    to exp(lse) + exp(sink). attended [T, heads, d]; `lse` [T, heads] float32: natural log-sum-exp of the scores; sinks
    [heads].
    """
    return attended.mul_((lse - sinks.float()).sigmoid_().unsqueeze(-1))

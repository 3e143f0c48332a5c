"""Attention of a whole model: the backends of each layer, chosen by its spec and planned together once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from minisgl.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    AttentionSpec,
    ExpandingPlan,
    GraphedDecode,
    PlansDecodes,
    RecurrentSpec,
)
from minisgl.attention.latent.key_blocks import MIN_EXPANDED
from minisgl.core import Int32Array
from minisgl.kvcache.layout import KVLayout, Store

if TYPE_CHECKING:
    from minisgl.attention.fused import FusedDecode, FusedRows


_MAX_ABSORBED = 1 << 18  # queries times keys of long chunks up to which a graph with absorbed attention is faster


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """Backends of a layer; layers of one spec share them."""

    title: str  # for the log
    spec: AttentionSpec
    prefill: AttentionBackend  # any step
    decode: AttentionBackend  # steps that are decodes throughout
    fused: FusedDecode | None = None  # captured decodes, in the place of `decode`

    @property
    def stores(self) -> tuple[Store, ...]:
        """Stores in which the layer itself keeps a token; none if it shares K and V of another layer."""
        return self.spec.kv_stores() if self.spec.stores_kv else ()

    @property
    def upcast_stores(self) -> tuple[Store, ...]:
        """Stores of the copy that a backend reads instead of FP8 pages, if it needs one."""
        return self.spec.kv_stores(self.spec.dtype) if self.prefill.upcasts or self.decode.upcasts else ()


class ModelAttention:
    """Plans a step for all attention layers. The other layers have a state per slot, which is part of the layout."""

    def __init__(self, layers: Sequence[LayerAttention | RecurrentSpec], *, window_group: bool = False) -> None:
        """`window_group`: layers with a window have pages and a page table of their own."""
        self._window_group = window_group
        self._attending = {index: layer for index, layer in enumerate(layers) if isinstance(layer, LayerAttention)}
        self.layers = tuple(self._attending.values())
        self._stores = tuple(layer.stores for layer in layers)
        # Number of inputs before a token that recurrent layers read; None: there are no such layers.
        self.history = max((layer.history for layer in layers if isinstance(layer, RecurrentSpec)), default=None)

    @property
    def graph_safe(self) -> bool:
        """True if a CUDA graph may hold any decode."""
        return all(layer.fused is not None or layer.decode.graph_safe for layer in self.layers)

    @property
    def prefill_graph_safe(self) -> bool:
        """True if a CUDA graph may hold the attention of any step."""
        return all(layer.prefill.prefill_graph_safe for layer in self.layers)

    @property
    def reads_whole_pages(self) -> bool:
        """True if a backend does; then a page must be cleared before a request gets it."""
        return any(layer.prefill.reads_whole_pages or layer.decode.reads_whole_pages for layer in self.layers)

    def fits_graph(self, query_lens: Int32Array, kv_lens: Int32Array) -> bool:
        """Return True if a graph is the fastest way for a step that prefills and has few tokens.

        In a graph latent attention is absorbed. For long chunks after many cached tokens, this costs more than the
        launches of a step without a graph.
        """
        if all(layer.spec.latent is None for layer in self.layers):
            return True
        scores = query_lens.astype(np.int64) * kv_lens
        return int(scores[query_lens >= MIN_EXPANDED].sum()) <= _MAX_ABSORBED

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of the pool that these layers attend to."""
        upcast = {layer.upcast_stores for layer in self.layers} - {()}
        if len(upcast) > 1:
            raise ValueError("layers whose FP8 pages are upcast share one buffer, so they must store alike")
        windows: dict[int, int] = {}
        if self._window_group:
            found = ((index, layer.spec.window) for index, layer in self._attending.items())
            windows = {index: window for index, window in found if window is not None}
        return KVLayout(
            page_size=self.layers[0].spec.page_size,
            layers=self._stores,
            upcast=upcast.pop() if upcast else (),
            windowed=frozenset(windows),
            window=max(windows.values(), default=None),
        )

    def begin_compiling(self, max_rows: int, *, rounded: bool = False) -> None:
        """Compile the kernels of fused decodes of up to `max_rows` rows, in threads; see `FusedDecode`."""
        for fused in {layer.fused for layer in self.layers if layer.fused is not None}:
            fused.begin_compiling(max_rows, rounded=rounded)

    def plan(self, inputs: AttentionInputs) -> Mapping[int, AttentionPlan]:
        """Return each layer's plan for a step that is launched operation by operation, or for a graph of any step."""
        decode = int(inputs.query_lens.max()) == 1
        backends = {index: layer.decode if decode else layer.prefill for index, layer in self._attending.items()}
        specs = {backend: self._attending[index].spec for index, backend in backends.items()}
        plans = {backend: backend.plan(inputs.of_layer(spec)) for backend, spec in specs.items()}
        return {index: plans[backend] for index, backend in backends.items()}

    def expanding(self, plans: Mapping[int, AttentionPlan]) -> Mapping[int, ExpandingPlan]:
        """Return the plans of a step that expand keys and values, by layer."""
        return {
            layer: plan
            for layer, plan in plans.items()
            # isinstance with a protocol takes the host some 30 us, so the cheaper condition comes first.
            if self._attending[layer].spec.latent is not None and isinstance(plan, ExpandingPlan)
        }

    def capture_decode(self, rows: int) -> CapturedDecode:
        """Return the attention of a captured decode of this many rows. The largest number is requested first."""
        return CapturedDecode(self._attending, rows, window_group=self._window_group)


class CapturedDecode:
    """Attention of one captured decode, in its capture and in its replays."""

    def __init__(self, layers: Mapping[int, LayerAttention], rows: int, *, window_group: bool) -> None:
        self._layers = layers
        self._specs = {layer.decode: layer.spec for layer in layers.values() if layer.fused is None}
        self._graphed: dict[AttentionBackend, GraphedDecode] = {
            backend: backend.graphed_decode(rows) for backend in self._specs if isinstance(backend, PlansDecodes)
        }
        in_group = {window_group and spec.window is not None for spec in self._specs.values()}
        # True if some layer reads AttentionInputs.page_table, or window_table. Fused layers read the tables of all
        # slots.
        self.reads_page_table = False in in_group
        self.reads_window_table = True in in_group
        self.prepare(np.zeros(rows, dtype=np.int32))

    def plan(self, inputs: AttentionInputs) -> Mapping[int, AttentionPlan]:
        """Return the plan of each layer that is not fused, as `GraphedDecode.plan` makes it."""
        plans = {
            backend: self._graphed.get(backend, backend).plan(inputs.of_layer(spec))
            for backend, spec in self._specs.items()
        }
        return {index: plans[layer.decode] for index, layer in self._layers.items() if layer.fused is None}

    def fused_rows(
        self, slots: Tensor, kv_lens: Tensor, page_table: Tensor, window_table: Tensor | None = None
    ) -> Mapping[int, FusedRows]:
        """Return the attention of each layer that is fused; arguments as in `FusedDecode.rows`, with both tables."""
        specs = {layer.spec: layer.fused for layer in self._layers.values() if layer.fused is not None}
        windowed = page_table if window_table is None else window_table
        rows = {
            spec: fused.rows(spec, slots, kv_lens, page_table if spec.window is None else windowed)
            for spec, fused in specs.items()
        }
        return {index: rows[layer.spec] for index, layer in self._layers.items() if layer.fused is not None}

    def prepare(self, positions: Int32Array) -> None:
        """Do the host's work for the next replay, as in `GraphedDecode.prepare`."""
        for graphed in self._graphed.values():
            graphed.prepare(positions)

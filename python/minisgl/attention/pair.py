"""Two backends side by side: one for steps that are decodes throughout, one for all others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionInputs, AttentionPlan, GraphedDecode
from minisgl.core import Int32Array
from minisgl.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class PairPlan:
    backend: AttentionBackend
    plan: AttentionPlan


class PairAttention:
    """Implements attention.base.AttentionBackend."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._prefill = prefill
        self._decode = decode
        self.graph_safe = decode.graph_safe
        self.prefill_graph_safe = prefill.prefill_graph_safe
        self.widens = prefill.widens or decode.widens

    def plan(self, inputs: AttentionInputs) -> PairPlan:
        backend = self._decode if int(inputs.query_lens.max()) == 1 else self._prefill
        return PairPlan(backend, backend.plan(inputs))

    def graphed_decode(self, rows: int) -> GraphedDecode:
        return GraphedPair(self._decode, rows)

    def forward(self, layer: int, q: Tensor, kv: KVPool, plan: AttentionPlan, window: int | None = None) -> Tensor:
        assert isinstance(plan, PairPlan)
        return plan.backend.forward(layer, q, kv, plan.plan, window)


class GraphedPair:
    """Implements attention.base.GraphedDecode."""

    def __init__(self, decode: AttentionBackend, rows: int) -> None:
        self._backend = decode
        self._graphed = decode.graphed_decode(rows)

    def plan(self, inputs: AttentionInputs) -> PairPlan:
        return PairPlan(self._backend, self._graphed.plan(inputs))

    def prepare(self, positions: Int32Array) -> None:
        self._graphed.prepare(positions)

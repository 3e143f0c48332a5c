"""Context of a step for a model's forward: passed down as an argument, never a global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from minisgl.attention.base import AttentionPlan, ExpandingPlan
    from minisgl.attention.fused import FusedRows
    from minisgl.kernel.base import Ops
    from minisgl.kernel.delta_net.recurrent_rows import RecurrentRows
    from minisgl.kvcache.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Tensors of one step of T tokens, and the objects that layers call."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64: position of each token in its sequence
    out_cache_loc: Tensor  # [T] int64: page * page_size + offset, where each token's K and V are written
    logits_indices: Tensor | None  # [R] int64: tokens whose final hidden states are needed; None: all T
    kv: KVPool
    ops: Ops
    attention: Mapping[int, AttentionPlan]  # by layer, except those in `fused`
    fused: Mapping[int, FusedRows] = field(default_factory=dict)  # by layer; replaces norm_rope_store and a plan
    expanding: Mapping[int, ExpandingPlan] = field(default_factory=dict)  # by layer: those of `attention` that expand
    recurrent: RecurrentRows | None = None  # if some layers are recurrent
    logits: Tensor | None = None  # [S, vocab_size]: tensor that the model writes; None: a new one
    sharded_logits: bool = False  # each rank computes only the logits of its shard of the vocabulary
    window_cache_loc: Tensor | None = None  # out_cache_loc of layers that have pages of their own

    def cache_loc(self, layer: int) -> Tensor:
        """Return where a layer's K and V are written, [T] int64."""
        if self.window_cache_loc is None or layer not in self.kv.windowed:
            return self.out_cache_loc
        return self.window_cache_loc

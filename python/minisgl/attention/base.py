"""What an attention backend promises. A new one is one file that implements these two classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.core import Int32Array
from minisgl.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The rows of one step as attention sees them: row i's queries are its last `query_lens[i]` positions.

    `query_lens` and `kv_lens` are the host's copies of what the tensors hold, so that planning needs no sync.
    """

    query_lens: Int32Array  # [rows] host: new tokens of each row
    kv_lens: Int32Array  # [rows] host: tokens of each row in the cache after this step's are written
    query_starts: Tensor  # [rows + 1] int32: prefix sums of query_lens
    kv_lens_device: Tensor  # [rows] int32
    page_table: Tensor  # [rows, max_pages] int32: page of each block of page_size positions


class AttentionPlan(Protocol):
    """Made by a backend's `plan`, read by its `forward` in every layer; opaque to everyone else."""


class AttentionBackend(Protocol):
    """Causal attention of new queries over the paged KV pool (K and V of the step are already stored there)."""

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Host-side preparation of a step, once for all layers."""
        ...

    def forward(self, layer: int, q: Tensor, kv: KVPool, plan: AttentionPlan, window: int | None = None) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads, head_dim], scaled by head_dim ** -0.5.

        A query at position i attends to the positions j <= i, of them to j > i - window where a window is given.
        """
        ...

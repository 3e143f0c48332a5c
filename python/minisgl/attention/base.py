"""What an attention backend promises. A new one is a file with these two classes, named in `select` and `config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minisgl.core import Int32Array
from minisgl.kvcache.pool import KVLayout, KVPool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of the model, as one rank has it, and of its pool."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    windowed: bool = False  # some layer has a sliding window
    fp8_kv: bool = False  # K and V are stored in 8 bits
    norm_dtype: torch.dtype | None = None  # of the weights of norms of q and k, if there are any; None: dtype
    scale: float | None = None  # factor of q @ k; None: head_dim ** -0.5

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """Factor of q @ k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pool."""
        return torch.float8_e4m3fn if self.fp8_kv else self.dtype

    def kv_layout(self, num_layers: int, widened: torch.dtype | None = None) -> KVLayout:
        """What a page of such a pool holds; `widened` as in KVLayout."""
        return KVLayout(num_layers, self.page_size, self.num_kv_heads, self.head_dim, self.kv_dtype, widened)


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


class GraphedDecode(Protocol):
    """A backend's share in one captured decode of a fixed number of rows, and in its replays."""

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Like `AttentionBackend.plan`, but called once before the capture and once during it. Nothing on the host may
        depend on the lengths: a replay finds others in the tensors.
        """
        ...

    def prepare(self, positions: Int32Array) -> None:
        """The host's work for the next replay: [rows or fewer] the position of each row's query.

        Rows that are missing at the end are padding, of one token.
        """
        ...


class AttentionBackend(Protocol):
    """Causal attention of new queries over the paged KV pool (K and V of the step are already stored there)."""

    @property
    def graph_safe(self) -> bool:
        """Whether a decode does the same work whatever the lengths, so that a CUDA graph may hold it."""
        ...

    @property
    def prefill_graph_safe(self) -> bool:
        """The same of any step, rows of no query among its rows: its plan is made in the graph."""
        ...

    @property
    def widens(self) -> bool:
        """Whether it reads a pool of 8 bits by way of `KVPool.wide`."""
        ...

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Host-side preparation of a step, once for all layers."""
        ...

    def graphed_decode(self, rows: int) -> GraphedDecode:
        """To capture decodes of this many rows with. Asked for the largest number first."""
        ...

    def forward(self, layer: int, q: Tensor, kv: KVPool, plan: AttentionPlan, window: int | None = None) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads, head_dim].

        A query at position i attends to the positions j <= i, of them to j > i - window where a window is given.
        """
        ...


class Unprepared:
    """The GraphedDecode of a backend whose plans cost the host nothing."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.plan = backend.plan

    def prepare(self, positions: Int32Array) -> None:
        pass


class Unplanned:
    """The GraphedDecode of decodes that no backend takes part in."""

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:  # noqa: ARG002
        return None

    def prepare(self, positions: Int32Array) -> None:
        pass


def window_left(window: int | None) -> int:
    """Positions that a query sees to its left, itself not counted; -1: all."""
    return -1 if window is None else window - 1

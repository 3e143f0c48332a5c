"""Latent attention (MLA) on the kernels of csrc/, for Hopper and later: any step, and any in a CUDA graph.

Decodes and tokens of short chunks attend to the latents themselves (absorbed attention), query by query. For long
chunks keys and values are expanded, if the GPU and the heads allow it and the step does not run in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AbsorbedTokens, AttentionInputs, AttentionPlan, AttentionSpec
from minisgl.attention.latent.decode import LatentQueries
from minisgl.attention.latent.key_blocks import MIN_EXPANDED
from minisgl.attention.latent.prefill import ExpandedChunks, expands, plan_chunks
from minisgl.kernel.launch.compile import Compiler
from minisgl.kvcache.kv_pool import KVPool
from minisgl.uploads import upload


@dataclass(frozen=True, slots=True)
class LatentStep:
    """Implements attention.base.ExpandingPlan: a step with long chunks."""

    every: LatentQueries  # all tokens, absorbed
    chunks: ExpandedChunks
    absorbed: AbsorbedTokens | None

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:
        return self.every.forward(layer, q, kv, sinks)

    def forward_expanded(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, weight: Tensor, kv: KVPool, out: Tensor
    ) -> None:
        self.chunks.attend(q_nope, q_rope, weight, kv.keys(layer), out)


class LatentAttentionBackend:
    """Implements attention.base.AttentionBackend."""

    graph_safe = True
    prefill_graph_safe = True
    upcasts = False
    reads_whole_pages = False

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        if spec.latent is None:
            raise ValueError("the layers' attention is not latent")
        self._spec, self._dims = spec, spec.latent
        self._compiler = Compiler(device)
        self._expands = expands(self._dims, spec.dtype, self._compiler)

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        if inputs.graph_tokens is None and int(inputs.query_lens.max()) == 1:
            return self._queries(inputs.kv_lens_device, inputs.page_table, None)
        every = self._tokens(inputs)
        long = inputs.query_lens >= MIN_EXPANDED
        if inputs.graph_tokens is not None or not self._expands or not long.any():
            return every
        chunks = plan_chunks(self._spec, self._dims, self._compiler, inputs, np.flatnonzero(long).astype(np.int32))
        return LatentStep(every, chunks, None if long.all() else self._absorbed(every, inputs, long))

    def _tokens(self, inputs: AttentionInputs) -> LatentQueries:
        """Return a step's tokens as rows of one query."""
        tokens = inputs.graph_tokens or int(inputs.query_lens.sum())
        ends, token = inputs.query_starts[1:], torch.arange(tokens, dtype=torch.int32, device=inputs.page_table.device)
        rows = torch.searchsorted(ends, token, right=True, out_int32=True)
        # A graph's padding tokens form one long row, whose first tokens would see no key.
        lengths = (inputs.kv_lens_device[rows] - (ends[rows] - 1 - token)).clamp_(min=1)
        return self._queries(lengths, inputs.page_table, rows)

    def _absorbed(self, every: LatentQueries, inputs: AttentionInputs, long: np.ndarray) -> AbsorbedTokens:
        """Return the tokens of the rows that are not `long`, and their plan."""
        indices = np.flatnonzero(np.repeat(~long, inputs.query_lens))
        tokens = upload(indices, inputs.page_table.device)
        rows = None if every.table_rows is None else every.table_rows[tokens]
        return AbsorbedTokens(tokens, self._queries(every.lengths[tokens], every.page_table, rows))

    def _queries(self, lengths: Tensor, page_table: Tensor, table_rows: Tensor | None) -> LatentQueries:
        return LatentQueries(self._spec, self._dims, lengths, page_table, table_rows, self._compiler)

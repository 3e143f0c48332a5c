"""Plays the engine: pages in random order, a ForwardContext for rows of (sequence, start, length)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.base import AttentionInputs, AttentionSpec, RecurrentSpec
from minisgl.attention.model_attention import LayerAttention, ModelAttention
from minisgl.context import ForwardContext
from minisgl.kernel.base import Ops
from minisgl.kernel.delta_net.recurrent_rows import recurrent_rows
from minisgl.kernel.torch_ops import TorchOps
from minisgl.kvcache.kv_pool import KVPool
from minisgl.layers.layer_config import AttentionConfig
from minisgl.layers.linear import bind_weights
from minisgl.models.decoder import CausalLM
from minisgl.models.generic.causal_lm import GenericCausalLM

MAX_SEQUENCES = 8


@dataclass
class Tracked:
    """Known tokens, and how many of them are in the pool."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    done: int = 0
    slot: int = 0


class Harness:
    def __init__(
        self,
        model: CausalLM | GenericCausalLM,
        *,
        page_size: int = 4,
        num_pages: int = 300,
        seed: int = 0,
        ops: Ops | None = None,
    ) -> None:
        config = model.config
        device = next(model.parameters()).device
        self.model = model
        self.ops = ops or TorchOps()
        bind_weights(model, self.ops)
        self.page_size = page_size
        self.device = device
        backends: dict[AttentionSpec, TorchAttention] = {}
        layers: list[LayerAttention | RecurrentSpec] = []
        for layer in config.layers:
            if isinstance(layer.attention, AttentionConfig):
                spec = AttentionSpec.of(layer.attention, tp_size=model.tp.size, page_size=page_size, dtype=model.dtype)
                backend = backends.setdefault(spec, TorchAttention(spec))
                layers.append(LayerAttention("", spec, backend, backend))
            else:
                layers.append(RecurrentSpec.of(layer.attention, tp_size=model.tp.size, dtype=model.dtype))
        self.attention = ModelAttention(layers)
        self.pool = KVPool(self.attention.kv_layout, num_pages, device, num_slots=MAX_SEQUENCES)
        self.slots = 0
        # Unwritten states must not matter. They are large, not NaN, which would spread through a masked product.
        for tensor in self.pool.states(0):
            tensor.fill_(50.0)
        self.free = np.random.default_rng(seed).permutation(num_pages).tolist()

    def add(self, tokens: Sequence[int]) -> Tracked:
        self.slots += 1
        return Tracked(list(tokens), slot=self.slots - 1)

    def add_sharing(self, tokens: Sequence[int], other: Tracked, prefix: int) -> Tracked:
        """A sequence that begins with whole pages of another's, as after a hit of the prefix cache."""
        assert prefix % self.page_size == 0
        assert prefix <= other.done
        assert list(tokens[:prefix]) == other.tokens[:prefix]
        return Tracked(list(tokens), other.pages[: prefix // self.page_size], prefix)

    @torch.no_grad()
    def step(self, rows: Sequence[tuple[Tracked, int]], *, every_token: bool = False) -> torch.Tensor:
        """Extend each sequence by a number of its known tokens; logits of the last of each row (or of all)."""
        starts = [seq.done for seq, _ in rows]
        lengths = [length for _, length in rows]
        for seq, length in rows:
            seq.done += length
            assert seq.done <= len(seq.tokens)
            while len(seq.pages) * self.page_size < seq.done:
                seq.pages.append(self.free.pop())
        table = torch.full((len(rows), max(len(seq.pages) for seq, _ in rows) + 1), 10**6, dtype=torch.int32)
        for row, (seq, _) in enumerate(rows):
            table[row, : len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int32)
        positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
        row_of = [row for row, length in enumerate(lengths) for _ in range(length)]
        slots = [
            rows[row][0].pages[position // self.page_size] * self.page_size + position % self.page_size
            for row, position in zip(row_of, positions, strict=True)
        ]
        tokens = [rows[row][0].tokens[position] for row, position in zip(row_of, positions, strict=True)]
        ends = np.cumsum(lengths)
        kv_lens = np.array(starts, np.int32) + np.array(lengths, np.int32)
        inputs = AttentionInputs(
            query_lens=np.array(lengths, np.int32),
            kv_lens=kv_lens,
            query_starts=self._tensor([0, *ends], torch.int32),
            kv_lens_device=self._tensor(kv_lens, torch.int32),
            page_table=table.to(self.device),
        )
        every_row_samples = every_token or max(lengths) == 1
        recurrent = None
        if self.attention.history is not None:
            row_slots, places = self._tensor([seq.slot for seq, _ in rows]), self._tensor(positions)
            recurrent = recurrent_rows(inputs.query_lens, row_slots, places, self.attention.history, self._tensor)
        ctx = ForwardContext(
            input_ids=self._tensor(tokens),
            positions=self._tensor(positions),
            out_cache_loc=self._tensor(slots),
            logits_indices=None if every_row_samples else self._tensor(ends - 1),
            kv=self.pool,
            ops=self.ops,
            attention=self.attention.plan(inputs),
            recurrent=recurrent,
        )
        logits: torch.Tensor = self.model(ctx)
        return logits

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=dtype, device=self.device)

"""Forward and sampling of one step, launched operation by operation.

Any batch can run this way. On CUDA, decodes and small prefills replay the same operations from graphs
(`engine.cuda_graphs.graphs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionInputs
from minisgl.attention.model_attention import CapturedDecode, ModelAttention
from minisgl.context import ForwardContext
from minisgl.core import Batch, Int32Array, Logprobs, StepResult, pages_for
from minisgl.engine.sampling.logits_processing import process_logits
from minisgl.engine.sampling.sampler import Sampler, compute_logprobs
from minisgl.engine.state import SlotState
from minisgl.engine.step_inputs import StepInputs, last_pages, step_inputs, upload_inputs
from minisgl.kernel.base import Ops
from minisgl.kernel.delta_net.recurrent_rows import RecurrentRows, SingleRows, captured_rows, recurrent_rows
from minisgl.kvcache.kv_pool import KVPool
from minisgl.models.base import Model
from minisgl.uploads import upload

if TYPE_CHECKING:  # needs CUDA's packages
    from minisgl.engine.sampling.sharded_logits import ShardedLogits


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of a step's forward, from which tokens are sampled."""

    logits: Tensor  # [S, vocab_size] of the rows that sample; of a pooling model, their vectors [S, size]
    slots: Tensor  # [S] int64
    prompt_logprobs: Logprobs[Tensor] | None = None  # if the plan wants them
    is_pooled: bool = False  # True: these are vectors, and no tokens are sampled


class StepRunner:
    """Runs steps in two launches, `forward` and `sample`, with everything that they need."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        state: SlotState,
        attention: ModelAttention,
        ops: Ops,
        sampler: Sampler,
        sharded_logits: ShardedLogits | None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.state = state
        self.attention = attention
        self.ops = ops
        self.sampler = sampler
        self.sharded_logits = sharded_logits  # for captured decodes, if ranks keep their logits sharded
        self._clears_pages = attention.reads_whole_pages
        self._row_numbers = torch.arange(len(state.lengths) + 1, dtype=torch.int32, device=state.device)

    def apply(self, batch: Batch) -> None:
        """Update the slot state, new pages and the recurrent states for this step."""
        self.state.apply(batch)
        if self._clears_pages and len(batch.new_pages) > 0:
            pages = upload(last_pages(batch, self.state.page_size), self.state.device)
            for column, windowed in zip(pages, (False, True), strict=False):
                self.kv.clear(column, windowed=windowed)
        self.kv.copy_states(batch.state_copies)

    def forward(self, batch: Batch) -> ForwardOutput:
        """Run the model, and the head for the tokens whose logits are needed."""
        host = step_inputs(batch)
        inputs = upload_inputs(host, self.state.device)
        logits_indices = inputs.logits_indices.long()
        ctx = self.context(inputs, batch.query_lens, host.kv_lens, logits_indices=logits_indices)
        return self.output(batch, self.model.model(ctx), logits_indices, inputs.sampling_slots.long(), inputs, ctx)

    def context(
        self,
        inputs: StepInputs[Tensor],
        query_lens: Int32Array,
        kv_lens: Int32Array,
        *,
        logits_indices: Tensor | None,
        in_graph: bool = False,
    ) -> ForwardContext:
        """Return the context of any step. `in_graph`: the host's lengths are the longest possible."""
        state = self.state
        token_slots, positions, slots = inputs.token_slots.long(), inputs.positions.long(), inputs.slots.long()
        width = pages_for(int(kv_lens.max()), state.page_size)
        attended = AttentionInputs(
            query_lens=query_lens,
            kv_lens=kv_lens,
            query_starts=inputs.query_starts,
            kv_lens_device=inputs.kv_lens,
            page_table=state.page_table[slots, :width],
            graph_tokens=len(token_slots) if in_graph else None,
            window_table=None if state.window_table is None else state.window_table[slots, :width],
        )
        plans, windowed = self.attention.plan(attended), state.window_table
        return ForwardContext(
            input_ids=state.tokens[token_slots, positions].long(),
            positions=positions,
            out_cache_loc=state.out_cache_loc(state.page_table, token_slots, positions),
            window_cache_loc=None if windowed is None else state.out_cache_loc(windowed, token_slots, positions),
            logits_indices=logits_indices,
            kv=self.kv,
            ops=self.ops,
            attention=plans,
            expanding=self.attention.expanding(plans),
            recurrent=self._recurrent_rows(inputs, None if in_graph else query_lens, slots, positions),
        )

    def _recurrent_rows(
        self, inputs: StepInputs[Tensor], query_lens: Int32Array | None, slots: Tensor, positions: Tensor
    ) -> RecurrentRows | None:
        """Return the rows for recurrent layers, if there are any; `query_lens` is None in a graph."""
        history = self.attention.history
        if history is None:
            return None
        if query_lens is None:
            return captured_rows(inputs.query_starts, slots, positions)
        return recurrent_rows(query_lens, slots, positions, history, lambda array: upload(array, self.state.device))

    def output(
        self,
        batch: Batch,
        states: Tensor,
        logits_indices: Tensor,
        slots: Tensor,
        inputs: StepInputs[Tensor],
        ctx: ForwardContext,
    ) -> ForwardOutput:
        """Return the output of a step, from the hidden states of the tokens `logits_indices` [S + P] int64.

        The first S of these are the last tokens of the rows that sample, which have the slots [S] int64.
        """
        logits = self.model.logits(states[: len(slots)], ctx)
        if batch.logprobs is None or len(logits_indices) == len(slots):
            return ForwardOutput(logits, slots)
        scored, tokens = states[len(slots) :], logits_indices[len(slots) :]
        return ForwardOutput(
            logits,
            slots,
            compute_logprobs(
                lambda piece: self.model.logits(scored[piece], ctx),
                self.state.tokens[inputs.token_slots[tokens].long(), inputs.positions[tokens].long() + 1].long(),
                self.model.config.vocab_size,
                batch.logprobs.prompt_top,
            ),
        )

    def sample(
        self,
        batch: Batch,
        output: ForwardOutput,
        bitmask: Tensor | None = None,
        *,
        replay: Callable[[], Tensor] | None = None,
        processed_logprobs: bool = False,
    ) -> StepResult[Tensor]:
        """Sample the tokens and append them to their slots; score them, if the plan wants it.

        Vectors of a pooling model are returned as they are. `bitmask` as in `Sampler.sample`; `replay` is called in
        place of the sampler. `processed_logprobs`: score with the logits after processing and temperature, else with
        the model's.
        """
        wanted, logits, slots = batch.logprobs, output.logits, output.slots
        if output.is_pooled:
            return StepResult(slots.int()[:0], vectors=logits)
        if wanted is not None:
            rows = upload(wanted.rows.astype(np.int64), self.state.device)
            scored = logits[rows]
            if processed_logprobs and len(wanted.rows) > 0:  # before the sampling, which changes the slots' lengths
                scored = self._processed(scored, slots[rows], None if bitmask is None else bitmask[rows])
        if replay is not None:
            tokens = replay()
        elif len(slots) == 0:
            tokens = slots.int()
        else:
            tokens = self.sampler.sample(logits, slots, self.state, batch.flags, bitmask)
        if wanted is None:
            return StepResult(tokens)
        chosen = tokens[rows].long().clamp_(min=0)  # NO_TOKEN is no index
        logprobs = compute_logprobs(scored.__getitem__, chosen, scored.shape[1], wanted.top)
        return StepResult(tokens, logprobs, output.prompt_logprobs)

    def _processed(self, logits: Tensor, slots: Tensor, bitmask: Tensor | None) -> Tensor:
        """Return logits [n, V] after processing and temperature, before the filters."""
        logits = process_logits(logits, slots, self.state, bitmask)
        logits /= self.state.logprob_temperature[slots].unsqueeze(1)
        return logits

    def decode_context(
        self, slots: Tensor, kv_lens: Int32Array, attention: CapturedDecode, logits: Tensor
    ) -> ForwardContext:
        """Return the context of a decode of `slots` [rows] int64, made of device state alone, for a graph.

        `kv_lens` are the host's lengths; at capture, the longest possible. `logits` [rows, vocab_size] are written; if
        they are sharded, these are the rank's own.
        """
        state, rows = self.state, len(slots)
        made = self.ops.decode_inputs(
            slots, state.tokens, state.lengths, state.page_table, state.page_size, pages=attention.reads_page_table
        )
        windowed = None
        if state.window_table is not None and attention.reads_window_table:
            windowed = self.ops.decode_inputs(
                slots, state.tokens, state.lengths, state.window_table, state.page_size, pages=True
            )
        inputs = AttentionInputs(
            query_lens=np.ones(rows, dtype=np.int32),
            kv_lens=kv_lens,
            query_starts=self._row_numbers[: rows + 1],
            kv_lens_device=made.kv_lens,
            page_table=made.page_table,
            window_table=None if windowed is None else windowed.page_table,
        )
        return ForwardContext(
            input_ids=made.input_ids,
            positions=made.positions,
            out_cache_loc=made.out_cache_loc,
            window_cache_loc=None if windowed is None else windowed.out_cache_loc,
            logits_indices=None,
            kv=self.kv,
            ops=self.ops,
            attention=attention.plan(inputs),
            fused=attention.fused_rows(slots, made.kv_lens, state.page_table, state.window_table),
            recurrent=RecurrentRows(SingleRows(slots, made.positions)),
            logits=logits,
            sharded_logits=self.sharded_logits is not None,
        )

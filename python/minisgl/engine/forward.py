"""From a plan to tensors: one step's forward and sampling, launched operation by operation.

Any batch runs this way. Decodes, and prefills that are not large, replay the same operations on CUDA from graphs
(`engine.decode_graphs`, `engine.prefill_graphs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionInputs
from minisgl.attention.model_attention import CapturedDecode, ModelAttention
from minisgl.context import ForwardContext
from minisgl.core import Batch, Int32Array, Logprobs, StepLogprobs, pages_for
from minisgl.engine.inputs import HostRows, LogitsIndices, RowInputs, split_like
from minisgl.engine.logprobs import compute_logprobs, no_logprobs
from minisgl.engine.processing import process_logits
from minisgl.engine.sampler import SampleKind, Sampler
from minisgl.engine.state import SlotState
from minisgl.engine.upload import upload
from minisgl.kernel.base import Ops
from minisgl.kvcache.pool import KVPool
from minisgl.models.decoder import CausalLM


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What the forward of a step brings."""

    logits: Tensor  # [S, vocab_size] of the rows that sample
    slots: Tensor  # [S] int64
    prompt_logprobs: Logprobs[Tensor] | None = None  # if the plan asks for some


@dataclass(frozen=True, slots=True)
class LogprobInputs:
    """Of which sampling rows log-probabilities are wanted."""

    rows: Tensor  # [n] int64
    logits: Tensor  # [n, vocab_size]: what they are the log-softmax of


class StepRunner:
    """The parts that a step needs, and the two launches it is made of: `forward`, then `sample`."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        state: SlotState,
        attention: ModelAttention,
        ops: Ops,
        sampler: Sampler,
    ) -> None:
        self.model = model
        self.kv = kv
        self.state = state
        self.attention = attention
        self.ops = ops
        self.sampler = sampler
        self._row_numbers = torch.arange(len(state.lengths) + 1, dtype=torch.int32, device=state.device)

    def forward(self, batch: Batch) -> ForwardOutput:
        """The model's work."""
        host = HostRows.of(batch)
        reads = LogitsIndices.of(batch, host.query_starts)
        arrays = [*host.arrays, *reads.arrays]
        *tensors, rows, slots = split_like(upload(np.concatenate(arrays), self.state.device), arrays)
        inputs = RowInputs(*tensors)
        rows = rows.long()
        ctx = self.context(inputs, batch.query_lens, host.kv_lens, logits_indices=rows)
        return self.read(batch, self.model.model(ctx), rows, slots.long(), inputs, ctx)

    def context(
        self, inputs: RowInputs, query_lens: Int32Array, kv_lens: Int32Array, *, logits_indices: Tensor | None
    ) -> ForwardContext:
        """The context of a step of any rows. The lengths are the host's idea of them: in a graph, the longest."""
        state = self.state
        token_slots, positions, slots = inputs.token_slots.long(), inputs.positions.long(), inputs.slots.long()
        width = pages_for(int(kv_lens.max()), state.page_size)
        attended = AttentionInputs(
            query_lens=query_lens,
            kv_lens=kv_lens,
            query_starts=inputs.query_starts,
            kv_lens_device=inputs.kv_lens,
            page_table=state.page_table[slots, :width],
        )
        return ForwardContext(
            input_ids=state.tokens[token_slots, positions].long(),
            positions=positions,
            out_cache_loc=state.out_cache_loc(token_slots, positions),
            logits_indices=logits_indices,
            kv=self.kv,
            ops=self.ops,
            attention=self.attention.plan(attended),
        )

    def read(
        self, batch: Batch, states: Tensor, rows: Tensor, slots: Tensor, inputs: RowInputs, ctx: ForwardContext
    ) -> ForwardOutput:
        """Return the logits of the tokens `rows` [S + P] int64, in the order of LogitsIndices, and
        the slots [S] int64 of those that sample.
        """
        logits = self.model.logits(states[: len(slots)], ctx)
        if batch.logprobs is None or len(rows) == len(slots):
            return ForwardOutput(logits, slots)
        scored, tokens = states[len(slots) :], rows[len(slots) :]
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

    def sample(self, batch: Batch, forwarded: ForwardOutput, mask: Tensor | None = None) -> Tensor:
        """The sampled tokens [S] int32; the slots have been advanced by them. `mask` as in Sampler.sample."""
        logits, slots = forwarded.logits, forwarded.slots
        if len(slots) == 0:
            return slots.int()
        return self.sampler.sample(logits, slots, self.state, SampleKind.of(batch), mask)

    def logprob_inputs(
        self, batch: Batch, forwarded: ForwardOutput, mask: Tensor | None, *, processed: bool
    ) -> LogprobInputs | None:
        """The logits that the sampled tokens' log-probabilities are computed from; None if nobody asks.

        `processed`: the logits as they are before the filters, else as the model gave them. Comes before `sample`,
        which makes the slots longer.
        """
        if batch.logprobs is None:
            return None
        rows = upload(batch.logprobs.rows.astype(np.int64), self.state.device)
        logits = forwarded.logits[rows]
        if processed and len(batch.logprobs.rows) > 0:
            slots = forwarded.slots[rows]
            logits = process_logits(logits, slots, self.state, None if mask is None else mask[rows])
            temperature = self.state.temperature[slots].unsqueeze(1)
            logits /= torch.where(temperature == 0.0, 1.0, temperature)
        return LogprobInputs(rows, logits)

    def logprobs(
        self, batch: Batch, forwarded: ForwardOutput, logprob_inputs: LogprobInputs | None, sampled: Tensor
    ) -> StepLogprobs[Tensor] | None:
        """Return the log-probabilities that the plan asks for, of the sampled tokens and of prompts."""
        plan = batch.logprobs
        if plan is None or logprob_inputs is None:
            return None
        output = compute_logprobs(
            logprob_inputs.logits.__getitem__,
            sampled[logprob_inputs.rows].long(),
            logprob_inputs.logits.shape[1],
            plan.top,
        )
        return StepLogprobs(output, forwarded.prompt_logprobs or no_logprobs(self.state.device))

    def decode_context(
        self, slots: Tensor, kv_lens: Int32Array, attention: CapturedDecode, logits: Tensor
    ) -> ForwardContext:
        """The context of a decode of `slots` [rows] int64, made from device state alone so that a graph can hold it.

        `kv_lens` is the host's idea of the lengths: at capture, the longest possible. `logits` [rows, vocab_size] is
        where they go.
        """
        state, rows = self.state, len(slots)
        made = self.ops.decode_inputs(
            slots, state.tokens, state.lengths, state.page_table, state.page_size, pages=attention.reads_page_table
        )
        inputs = AttentionInputs(
            query_lens=np.ones(rows, dtype=np.int32),
            kv_lens=kv_lens,
            query_starts=self._row_numbers[: rows + 1],
            kv_lens_device=made.kv_lens,
            page_table=made.page_table,
        )
        return ForwardContext(
            input_ids=made.input_ids,
            positions=made.positions,
            out_cache_loc=made.out_cache_loc,
            logits_indices=None,
            kv=self.kv,
            ops=self.ops,
            attention=attention.plan(inputs),
            fused=attention.fused_rows(slots, made.kv_lens, state.page_table),
            logits=logits,
        )

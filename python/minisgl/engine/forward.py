"""From a plan to tensors: one step's forward and sampling, launched operation by operation.

Any batch runs this way. A steady decode on CUDA replays the same operations from a graph (`engine.graph`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionInputs, GraphedDecode
from minisgl.context import ForwardContext
from minisgl.core import Batch, Int32Array, pages_for
from minisgl.engine.logprobs import LogprobTensors, compute_logprobs, no_logprobs
from minisgl.engine.processing import process_logits
from minisgl.engine.sampler import SampleKind, Sampler
from minisgl.engine.state import SlotState, upload, upload_together
from minisgl.kernel.base import Ops
from minisgl.kvcache.pool import KVPool
from minisgl.layers.decoder import CausalLM

if TYPE_CHECKING:
    from minisgl.attention.fused import FusedDecode


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What the forward of a step brings."""

    logits: Tensor  # [S, vocab_size] of the rows that sample
    slots: Tensor  # [S] int64
    prompt_logprobs: LogprobTensors | None = None  # if the plan asks for some


@dataclass(frozen=True, slots=True)
class Judged:
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
        attention: AttentionBackend,
        ops: Ops,
        sampler: Sampler,
        fused: FusedDecode | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.state = state
        self.attention = attention
        self.ops = ops
        self.sampler = sampler
        self.fused = fused  # attends in the backend's place in captured decodes
        self._row_numbers = torch.arange(len(state.lengths) + 1, dtype=torch.int32, device=state.device)

    def forward(self, batch: Batch) -> Forwarded:
        """The model's work."""
        state = self.state
        lengths = batch.lengths
        query_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        kv_lens = batch.starts + lengths
        token_slots = np.repeat(batch.slots, lengths)
        positions = np.arange(len(token_slots)) - np.repeat(query_starts[:-1] - batch.starts, lengths)
        sample_rows = query_starts[1:][batch.samples] - 1
        scored = _scored_tokens(batch, query_starts)
        slots_of_tokens, device_positions, rows, sampling_slots, slots, kv_lens_device, query_starts_device = (
            upload_together(
                [
                    token_slots,
                    positions,
                    np.concatenate([sample_rows, scored]),
                    batch.slots[batch.samples],
                    batch.slots,
                    kv_lens,
                    query_starts,
                ],
                state.device,
            )
        )
        slots_of_tokens, device_positions = slots_of_tokens.long(), device_positions.long()
        rows, sampling_slots = rows.long(), sampling_slots.long()

        width = pages_for(int(kv_lens.max()), state.page_size)
        inputs = AttentionInputs(
            query_lens=lengths,
            kv_lens=kv_lens,
            query_starts=query_starts_device,
            kv_lens_device=kv_lens_device,
            page_table=state.page_table[slots.long(), :width],
        )
        ctx = ForwardContext(
            input_ids=state.tokens[slots_of_tokens, device_positions].long(),
            positions=device_positions,
            kv_slots=state.kv_slots(slots_of_tokens, device_positions),
            sample_rows=rows,
            kv=self.kv,
            ops=self.ops,
            attention=self.attention,
            plan=self.attention.plan(inputs),
        )
        if batch.logprobs is None or len(scored) == 0:
            return Forwarded(self.model(ctx), sampling_slots)
        states = self.model.model(ctx)
        sampling_states, scored_states = states[: len(sample_rows)], states[len(sample_rows) :]
        tokens = rows[len(sample_rows) :]
        return Forwarded(
            self.model.logits(sampling_states, ctx),
            sampling_slots,
            compute_logprobs(
                lambda piece: self.model.logits(scored_states[piece], ctx),
                state.tokens[slots_of_tokens[tokens], device_positions[tokens] + 1].long(),
                self.model.config.vocab_size,
                batch.logprobs.prompt_top,
            ),
        )

    def sample(self, batch: Batch, forwarded: Forwarded, mask: Tensor | None = None) -> Tensor:
        """The sampled tokens [S] int64; the slots have been advanced by them. `mask` as in Sampler.sample."""
        logits, slots = forwarded.logits, forwarded.slots
        if len(slots) == 0:
            return slots
        return self.sampler.sample(logits, slots, self.state, SampleKind.of(batch), mask)

    def judged(self, batch: Batch, forwarded: Forwarded, mask: Tensor | None, *, processed: bool) -> Judged | None:
        """What the log-probabilities of the tokens to be sampled are of, if the plan asks for some.

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
        return Judged(rows, logits)

    def logprobs(
        self, batch: Batch, forwarded: Forwarded, judged: Judged | None, sampled: Tensor
    ) -> tuple[LogprobTensors, LogprobTensors] | None:
        """What the plan asks for, of the sampled tokens and of prompts."""
        plan = batch.logprobs
        if plan is None or judged is None:
            return None
        output = compute_logprobs(judged.logits.__getitem__, sampled[judged.rows], judged.logits.shape[1], plan.top)
        return output, forwarded.prompt_logprobs or no_logprobs(self.state.device)

    def decode_context(
        self, slots: Tensor, kv_lens: np.ndarray[tuple[int], np.dtype[np.int32]], attention: GraphedDecode
    ) -> ForwardContext:
        """The context of a decode of `slots` [rows] int64, made from device state alone so that a graph can hold it.

        `kv_lens` is the host's idea of the lengths: at capture, the longest possible.
        """
        state, rows = self.state, len(slots)
        made = self.ops.decode_inputs(
            slots, state.tokens, state.lengths, state.page_table, state.page_size, pages=self.fused is None
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
            kv_slots=made.kv_slots,
            sample_rows=None,
            kv=self.kv,
            ops=self.ops,
            attention=self.attention,
            plan=attention.plan(inputs),
            fused=self.fused.rows(slots, state.lengths, state.page_table) if self.fused else None,
        )


def _scored_tokens(batch: Batch, query_starts: Int32Array) -> Int32Array:
    """Which of the step's tokens the model's opinion on the next one is wanted of."""
    if batch.logprobs is None:
        return np.empty(0, dtype=np.int32)
    counts = batch.logprobs.prompt_lengths
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int32) + np.repeat(query_starts[:-1] - before, counts).astype(np.int32)

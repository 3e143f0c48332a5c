"""Steps of a pooling model: each row that reaches the end of its prompt returns a vector instead of a token.

A mean needs the hidden states of all tokens, so a row's sum is kept by slot from chunk to chunk, and no part of a
prompt may come from the prefix cache. A chunk at position 0 starts a new sum.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.model_attention import ModelAttention
from minisgl.core import Batch, Int32Array
from minisgl.engine.forward import ForwardOutput, StepRunner
from minisgl.engine.sampling.sampler import Sampler
from minisgl.engine.state import SlotState
from minisgl.engine.step_inputs import StepInputs, step_inputs, upload_inputs
from minisgl.kernel.base import Ops
from minisgl.kvcache.kv_pool import KVPool
from minisgl.models.pooling_model import PoolingModel
from minisgl.uploads import upload


class PoolingRunner(StepRunner):
    """StepRunner whose output is a vector of each row that samples, and no logits."""

    def __init__(
        self,
        model: PoolingModel,
        kv: KVPool,
        state: SlotState,
        attention: ModelAttention,
        ops: Ops,
        sampler: Sampler,
    ) -> None:
        super().__init__(model, kv, state, attention, ops, sampler, sharded_logits=None)
        self._sums: Tensor | None = None  # [slots, size] float32: sums over the tokens of each slot so far
        if model.pooling.method == "mean":
            self._sums = torch.zeros((len(state.lengths), model.pooling.size), device=state.device)

    def forward(self, batch: Batch) -> ForwardOutput:
        host = step_inputs(batch)
        inputs = upload_inputs(host, self.state.device)
        slots = inputs.sampling_slots.long()
        last_tokens = inputs.logits_indices[: len(slots)].long()
        ctx = self.context(
            inputs, batch.query_lens, host.kv_lens, logits_indices=last_tokens if self._sums is None else None
        )
        vectors = self.model.logits(self.model.model(ctx), ctx)
        if self._sums is not None:
            vectors = self._means(self._sums, vectors, batch, host, inputs)
        return ForwardOutput(vectors, slots, is_pooled=True)

    def _means(
        self,
        sums: Tensor,
        states: Tensor,
        batch: Batch,
        host: StepInputs[Int32Array],
        inputs: StepInputs[Tensor],
    ) -> Tensor:
        """Add the states [T, size] of this step to the slots' sums; return the means [S, size] of whole prompts."""
        slots = inputs.slots.long()
        carried = upload((batch.start_pos > 0).astype(np.float32), self.state.device).unsqueeze(1)
        sums[slots] *= carried
        sums.index_add_(0, inputs.token_slots.long(), states)
        lengths = upload(host.kv_lens[batch.needs_sample].astype(np.float32), self.state.device).unsqueeze(1)
        return sums[inputs.sampling_slots.long()] / lengths

"""CUDA graphs of the steps that prefill, alone or beside decodes: the decoder, captured for a few numbers of tokens.

Launched operation by operation, a layer takes the host some 0.25 ms, and the GPU less unless the step is large. A graph
has room for as many rows as its tokens can belong to. Which row each token belongs to, and how far it reaches
back, is sent with each step and read on the device. The head, which needs the sampling rows only, and the sampling
follow operation by operation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.context import ForwardContext
from minisgl.core import Batch
from minisgl.engine.capture import GraphMemory
from minisgl.engine.device import pinned
from minisgl.engine.forward import ForwardOutput, StepInputs, StepRunner, pad_inputs, step_inputs, views_like

SIZES = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))  # tokens
# Tokens x weights of a layer whose products take a fast GPU as long as the layer's launches take the host.
_LAUNCH_WORTH = 32e9


def prefill_graph_sizes(max_tokens: int, layer_weights: int) -> list[int]:
    """Of steps of up to `max_tokens`, those of which a graph shortens more than the launch, which is hidden."""
    useful = int(min(max_tokens, _LAUNCH_WORTH / layer_weights))
    return list(SIZES[: bisect_left(SIZES, useful) + 1])


@dataclass(slots=True)
class _Captured:
    """A graph for one number of tokens and what it reads."""

    rows: int  # without the row of the padding
    packed: Tensor  # int32: the inputs, then the reads of a step, which the graph does not touch
    inputs: StepInputs[Tensor]  # views of it
    context: ForwardContext
    graph: torch.cuda.CUDAGraph


class PrefillGraphs:
    """Captures at construction, largest first, so that the smaller ones reuse its memory.

    `captured` is called with each size that is done.
    """

    def __init__(
        self,
        runner: StepRunner,
        sizes: list[int],
        max_seq_len: int,
        memory: GraphMemory,
        captured: Callable[[], object],
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._max_seq_len = max_seq_len
        # Of all graphs: what one leaves is read before the next is replayed.
        self._states = torch.empty(
            (sizes[-1], runner.model.config.hidden_size), dtype=runner.model.dtype, device=runner.state.device
        )
        self._captured: dict[int, _Captured] = {}
        for size in reversed(sizes):
            self._captured[size] = self._capture(size, memory)
            captured()

    def _capture(self, size: int, memory: GraphMemory) -> _Captured:
        runner, device = self._runner, self._runner.state.device
        rows = min(runner.state.scratch_slot, size)
        empty = np.empty(0, dtype=np.int32)
        nothing = StepInputs(empty, empty, empty, empty, np.zeros(1, dtype=np.int32), empty, empty)
        padding = pad_inputs(nothing, size, rows, runner.state.scratch_slot, self._max_seq_len)
        inputs_len = sum(map(len, padding))
        packed = torch.zeros(inputs_len + size + 2 * rows, dtype=torch.int32, device=device)
        packed[:inputs_len] = torch.from_numpy(np.concatenate(padding)).to(device)
        inputs = views_like(packed, padding)
        query_lens = np.full(rows + 1, size, dtype=np.int32)
        kv_lens = np.full(rows + 1, self._max_seq_len, dtype=np.int32)

        def forward() -> ForwardContext:
            context = runner.context(inputs, query_lens, kv_lens, logits_indices=None)
            self._states[:size] = runner.model.model(context)
            return context

        graph, context = memory.capture(forward)
        return _Captured(rows, packed, inputs, context, graph)

    def fits(self, batch: Batch) -> bool:
        """Whether a graph has room for the plan's tokens."""
        return batch.num_tokens <= self._sizes[-1]

    def forward(self, batch: Batch) -> ForwardOutput:
        """Replay a plan that fits."""
        runner = self._runner
        size = self._sizes[bisect_left(self._sizes, batch.num_tokens)]
        captured = self._captured[size]
        host = pad_inputs(step_inputs(batch), size, captured.rows, runner.state.scratch_slot, self._max_seq_len)
        packed = pinned(np.concatenate(host))
        captured.packed[: len(packed)].copy_(packed, non_blocking=True)
        captured.graph.replay()
        # Copies, for what the sampling reads later must outlast the next step's inputs.
        views = views_like(captured.packed, host)
        logits_indices, slots = views.logits_indices.long(), views.sampling_slots.long()
        states = self._states[logits_indices]
        return runner.read(batch, states, logits_indices, slots, captured.inputs, captured.context)

"""CUDA graphs of steps: decodes for a few batch sizes, and the decoder of steps that prefill for a few token counts.

Launched operation by operation, a layer takes the host some 0.25 ms, and the GPU less unless the step is large. A graph
is launched at once, but its shapes are fixed: a step runs in the smallest graph that has room for it, padded. All
graphs share one pool of memory, because one step is over before the next begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.model_attention import CapturedDecode
from minisgl.context import ForwardContext
from minisgl.core import Batch, SamplingFlags
from minisgl.engine.forward import ForwardOutput, StepInputs, StepRunner, pad_inputs, step_inputs, views_like
from minisgl.engine.graph_sizes import GraphSizes
from minisgl.uploads import pinned, upload

T = TypeVar("T")

_DRAWN = SamplingFlags.SAMPLED | SamplingFlags.FILTERED


def samples_from_graph(batch: Batch) -> bool:
    """Return True if a decode's tokens are chosen as captured: neither masked nor processed."""
    return not batch.constrained and SamplingFlags.PROCESSED not in batch.flags


class Graphs:
    """Captures at construction; `captured` is called after each graph, of prefills first, the largest of them first."""

    def __init__(self, runner: StepRunner, sizes: GraphSizes, max_seq_len: int, captured: Callable[[], object]) -> None:
        memory = GraphMemory()
        self._prefill = PrefillGraphs(runner, sizes.prefill, max_seq_len, memory, captured) if sizes.prefill else None
        self._decode = DecodeGraphs(runner, sizes.decode, max_seq_len, memory, captured)

    def decode(self, batch: Batch) -> DecodeGraphs | None:
        """Return what replays the plan if it is a decode that fits."""
        return self._decode if self._decode.fits(batch) else None

    def prefill(self, batch: Batch) -> PrefillGraphs | None:
        """Return what replays the forward of any other plan that fits."""
        return self._prefill if self._prefill is not None and self._prefill.fits(batch) else None


class GraphMemory:
    """Memory that graphs use between their first kernel and their last: no two of them run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture the launches of `run` on the current stream; return them and its result, which every replay writes.

        A graph keeps no reference to the tensors it reads: its owner keeps what was alive at its capture.
        """
        run()  # libraries allocate their workspaces at the first call, which a graph must not hold
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            result = run()
        return graph, result


@dataclass(slots=True)
class _CapturedStep:
    """Graphs of one batch size, and tensors that they read or write."""

    attention: CapturedDecode
    forward: torch.cuda.CUDAGraph
    sample: dict[SamplingFlags, tuple[torch.cuda.CUDAGraph, Tensor]]
    keep: object


class DecodeGraphs:
    """Forward and sampling of decodes, captured for a few batch sizes at construction.

    Graphs for every batch size would take long to capture and much memory, so a batch runs in the next larger one. Its
    surplus rows compute all that the others do, and must do no harm: they name the scratch slot S, whose row writes to
    a page that nobody else has, and whose length never grows. With sizes 1, 2, 4 and 8, five requests in the slots 4,
    0, 2, 1 and 3 run as the rows [4, 0, 2, 1, 3, S, S, S], and the first five logits and tokens are read.

    A replay reads slots, lengths, tokens and pages from device state, so the rows' slots are all that is sent for it,
    and these only when they change. The largest size is captured first, so that the smaller ones reuse its memory.
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
        # For all sizes, each of which uses their beginning: what one step leaves is read before the next begins.
        model, device, scratch_slot = runner.model, runner.state.device, runner.state.scratch_slot
        self._rows = np.full(sizes[-1], scratch_slot, dtype=np.int32)  # contents of `_slots`
        self._slots = torch.full((sizes[-1],), scratch_slot, dtype=torch.int64, device=device)
        if runner.sharded_logits is None:
            self._logits = torch.empty((sizes[-1], model.config.vocab_size), dtype=model.dtype, device=device)
        else:
            self._logits = runner.sharded_logits.own[: sizes[-1]]
        self._captured: dict[int, _CapturedStep] = {}
        for size in reversed(sizes):
            self._captured[size] = self._capture(size, memory)
            captured()

    def _capture(self, size: int, memory: GraphMemory) -> _CapturedStep:
        runner, slots, logits = self._runner, self._slots[:size], self._logits[:size]
        kv_lens = np.full(size, self._max_seq_len, dtype=np.int32)
        attention = runner.attention.capture_decode(size)

        def forward() -> object:
            context = runner.decode_context(slots, kv_lens, attention, logits)
            runner.model(context)
            return context

        def choose(flags: SamplingFlags) -> Tensor:
            if runner.sharded_logits is not None:
                return runner.sharded_logits.sample(logits, slots, runner.state)
            return runner.sampler.sample(logits, slots, runner.state, flags)

        forward_graph, context = memory.capture(forward)
        samples = {flags: memory.capture(partial(choose, flags)) for flags in runner.sampler.graph_flags}
        return _CapturedStep(attention, forward_graph, samples, context)

    def fits(self, batch: Batch) -> bool:
        """Return True if the plan is a decode that a graph was captured for."""
        return batch.is_decode and len(batch.slots) <= self._sizes[-1]

    def forward(self, batch: Batch) -> ForwardOutput:
        """Replay the forward of a plan that fits. Its output is overwritten by the next replay."""
        rows, size = len(batch.slots), self._size_for(batch)
        padded = np.full(size, self._runner.state.scratch_slot, dtype=np.int32)
        padded[:rows] = batch.slots
        if not np.array_equal(self._rows[:size], padded):
            self._slots[:size] = upload(padded, self._slots.device)
            self._rows[:size] = padded  # behind the upload, which may find no memory
        captured = self._captured[size]
        captured.attention.prepare(batch.start_pos)
        captured.forward.replay()
        logits, sharded = self._logits[:rows], self._runner.sharded_logits
        if sharded is not None and (batch.logprobs is not None or not samples_from_graph(batch)):
            logits = sharded.whole(logits)
        return ForwardOutput(logits, self._slots[:rows])

    def sample(self, batch: Batch) -> Tensor:
        """Return the sampled tokens [rows] behind the same plan's forward, overwritten by the next replay.

        Not for plans whose rows are PROCESSED: the tables for that grow, so no graph may hold them.
        """
        graphs = self._captured[self._size_for(batch)].sample
        flags = batch.flags & _DRAWN
        graph, sampled = graphs[flags if flags in graphs else self._runner.sampler.graph_flags[-1]]
        graph.replay()
        return sampled[: len(batch.slots)]

    def _size_for(self, batch: Batch) -> int:
        return self._sizes[bisect_left(self._sizes, len(batch.slots))]


@dataclass(slots=True)
class _CapturedPrefill:
    """Graph for one number of tokens, and what it reads."""

    rows: int  # without the row of the padding
    packed: Tensor  # int32: StepInputs, of which the graph does not touch the last two
    inputs: StepInputs[Tensor]  # views of it
    context: ForwardContext
    graph: torch.cuda.CUDAGraph


class PrefillGraphs:
    """The decoder of steps that prefill, alone or beside decodes, captured for a few numbers of tokens.

    A graph has room for as many rows as its tokens can belong to. Which row each token belongs to, and how far it
    reaches back, is sent with each step and read on the device. The head, which needs the sampling rows only, and the
    sampling follow operation by operation.
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
        # For all graphs: what one leaves is read before the next is replayed.
        self._states = torch.empty(
            (sizes[-1], runner.model.config.hidden_size), dtype=runner.model.dtype, device=runner.state.device
        )
        self._captured: dict[int, _CapturedPrefill] = {}
        for size in reversed(sizes):
            self._captured[size] = self._capture(size, memory)
            captured()

    def _capture(self, size: int, memory: GraphMemory) -> _CapturedPrefill:
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
            context = runner.context(inputs, query_lens, kv_lens, logits_indices=None, in_graph=True)
            self._states[:size] = runner.model.model(context)
            return context

        graph, context = memory.capture(forward)
        return _CapturedPrefill(rows, packed, inputs, context, graph)

    def fits(self, batch: Batch) -> bool:
        """Return True if a graph has room for the plan's tokens, and is the fastest way."""
        few = batch.num_tokens <= self._sizes[-1]
        return few and self._runner.attention.fits_graph(batch.query_lens, batch.start_pos + batch.query_lens)

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

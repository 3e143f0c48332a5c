"""CUDA graphs of steps: decodes for a few batch sizes, and prefills (the decoder without head) for a few token counts.

Launching a layer operation by operation takes the host some 0.25 ms, and the GPU is faster unless the step is large. A
graph is one launch, but its shapes are fixed: a step is padded to the smallest graph with room for it. All graphs share
one pool of memory, because one step ends before the next begins.
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
from minisgl.core import Batch
from minisgl.engine.cuda_graphs.sizes import GraphSizes
from minisgl.engine.forward import ForwardOutput, StepRunner
from minisgl.engine.step_inputs import StepInputs, no_inputs, pad_inputs, step_inputs, views_like
from minisgl.sampling_params import SamplingFlags
from minisgl.uploads import pinned, upload

T = TypeVar("T")

_DRAWN = SamplingFlags.SAMPLED | SamplingFlags.FILTERED


def samples_from_graph(batch: Batch) -> bool:
    """Return True if the captured sampling serves a decode: no row has a grammar or processed logits."""
    return not batch.constrained and SamplingFlags.PROCESSED not in batch.flags


class Graphs:
    """All graphs, captured at construction: those of prefills first, then of decodes, each the largest first.

    `captured` is called after each size.
    """

    def __init__(self, runner: StepRunner, sizes: GraphSizes, captured: Callable[[], object]) -> None:
        self._memory = GraphMemory(captured)
        try:
            self._prefill = PrefillGraphs(runner, sizes.prefill, self._memory) if sizes.prefill else None
            self._decode = DecodeGraphs(runner, sizes.decode, self._memory)
        except BaseException:
            self.close()  # the traceback refers to those that there are, as in `Engine.close`
            raise

    def close(self) -> None:
        """Free the graphs, none of which may be replayed any more."""
        self._memory.free_graphs()

    def decode(self, batch: Batch) -> DecodeGraphs | None:
        """Return the graphs of decodes if the plan is a decode that fits."""
        return self._decode if self._decode.fits(batch) else None

    def prefill(self, batch: Batch) -> PrefillGraphs | None:
        """Return the graphs of prefills if one has room for the plan."""
        return self._prefill if self._prefill is not None and self._prefill.fits(batch) else None


class GraphMemory:
    """All graphs, and their memory for intermediate results, which they share because no two run at a time."""

    def __init__(self, captured: Callable[[], object] | None = None) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._captured = captured

    def capture_sizes(self, sizes: list[int], capture: Callable[[int], T]) -> dict[int, T]:
        """Return what `capture` returns for each of these ascending sizes.

        The largest size is captured first, so that the smaller ones reuse its memory.
        """
        found: dict[int, T] = {}
        for size in reversed(sizes):
            found[size] = capture(size)
            if self._captured is not None:
                self._captured()
        return found

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture the launches of `run` on the current stream; return the graph and `run`'s result.

        Every replay writes that result. A graph keeps no reference to the tensors that it reads, so its owner must.
        """
        run()  # libraries allocate workspaces at their first call, which must not be captured
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)  # before an exception may end its capture
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            result = run()
        return graph, result

    def free_graphs(self) -> None:
        """Free all graphs."""
        for graph in self._graphs:
            graph.reset()


@dataclass(slots=True)
class _CapturedStep:
    """Graphs of one batch size, and tensors that they read or write."""

    attention: CapturedDecode
    forward: torch.cuda.CUDAGraph
    sample: dict[SamplingFlags, tuple[torch.cuda.CUDAGraph, Tensor]]
    keep: object  # owns the tensors that the forward reads


class DecodeGraphs:
    """Forward and sampling of decodes, captured for a few batch sizes at construction.

    Graphs for every batch size would take long to capture and much memory, so a batch runs in the next larger size. Its
    surplus rows are computed like the others, and must do no harm: they have the scratch slot S, which writes to the
    scratch page, and whose length never grows. With sizes 1, 2, 4 and 8, five requests in the slots 4, 0, 2, 1 and 3
    run as the rows [4, 0, 2, 1, 3, S, S, S], and only the first five logits and tokens are used.

    A replay reads lengths, tokens and pages from device state, so only the rows' slots are sent for it, and only if
    they have changed.
    """

    def __init__(self, runner: StepRunner, sizes: list[int], memory: GraphMemory) -> None:
        self._runner = runner
        self._sizes = sizes
        # Shared by all sizes, each of which uses the first rows: a step's output is read before the next step begins.
        model, device, scratch_slot = runner.model, runner.state.device, runner.state.scratch_slot
        self._rows = np.full(sizes[-1], scratch_slot, dtype=np.int32)  # contents of `_slots`
        self._slots = torch.full((sizes[-1],), scratch_slot, dtype=torch.int64, device=device)
        if runner.sharded_logits is None:
            self._logits = torch.empty((sizes[-1], model.config.vocab_size), dtype=model.dtype, device=device)
        else:
            self._logits = runner.sharded_logits.own[: sizes[-1]]
        self._captured = memory.capture_sizes(sizes, partial(self._capture, memory))

    def _capture(self, memory: GraphMemory, size: int) -> _CapturedStep:
        runner, slots, logits = self._runner, self._slots[:size], self._logits[:size]
        kv_lens = np.full(size, runner.state.max_seq_len, dtype=np.int32)
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
        """Return True if the plan is a decode for which a graph was captured."""
        return batch.is_decode and len(batch.slots) <= self._sizes[-1]

    def forward(self, batch: Batch) -> ForwardOutput:
        """Replay the forward of a plan that fits. Its output is overwritten by the next replay."""
        rows, size = len(batch.slots), self._size_for(batch)
        padded = np.full(size, self._runner.state.scratch_slot, dtype=np.int32)
        padded[:rows] = batch.slots
        if not np.array_equal(self._rows[:size], padded):
            self._slots[:size] = upload(padded, self._slots.device)
            self._rows[:size] = padded  # after the upload, which may run out of memory
        captured = self._captured[size]
        captured.attention.prepare(batch.start_pos)
        captured.forward.replay()
        logits, sharded = self._logits[:rows], self._runner.sharded_logits
        if sharded is not None and (batch.logprobs is not None or not samples_from_graph(batch)):
            logits = sharded.whole(logits)
        return ForwardOutput(logits, self._slots[:rows])

    def sample(self, batch: Batch) -> Tensor:
        """Replay the sampling after the same plan's forward; return the tokens [rows] until the next replay.

        No row may be PROCESSED: the tables of that grow, so they cannot be captured.
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
    """Graph for one number of tokens, and the tensors that it reads."""

    rows: int  # without the row of the padding
    packed: Tensor  # int32: StepInputs, the last two of which the graph does not read
    inputs: StepInputs[Tensor]  # views of it
    context: ForwardContext
    graph: torch.cuda.CUDAGraph


class PrefillGraphs:
    """The decoder of steps with prefill rows, captured for a few token counts.

    A graph has room for as many rows as tokens. The row of each token and the row's length are sent with each step and
    read on the device. The head, which only the sampling rows need, and the sampling are launched operation by
    operation.
    """

    def __init__(self, runner: StepRunner, sizes: list[int], memory: GraphMemory) -> None:
        self._runner = runner
        self._sizes = sizes
        # Shared by all graphs: one graph's output is read before the next is replayed.
        self._states = torch.empty(
            (sizes[-1], runner.model.config.hidden_size), dtype=runner.model.dtype, device=runner.state.device
        )
        self._captured = memory.capture_sizes(sizes, partial(self._capture, memory))

    def _capture(self, memory: GraphMemory, size: int) -> _CapturedPrefill:
        runner, device = self._runner, self._runner.state.device
        rows = min(runner.state.scratch_slot, size)
        padding = pad_inputs(no_inputs(), size, rows, runner.state.scratch_slot, runner.state.max_seq_len)
        inputs_len = sum(map(len, padding))
        # Each token may have an index among logits_indices and each row another one, and each row a sampling slot.
        packed = torch.zeros(inputs_len + size + 2 * rows, dtype=torch.int32, device=device)
        packed[:inputs_len] = torch.from_numpy(np.concatenate(padding)).to(device)
        inputs = views_like(packed, padding)
        query_lens = np.full(rows + 1, size, dtype=np.int32)
        kv_lens = np.full(rows + 1, runner.state.max_seq_len, dtype=np.int32)

        def forward() -> ForwardContext:
            context = runner.context(inputs, query_lens, kv_lens, logits_indices=None, in_graph=True)
            self._states[:size] = runner.model.model(context)
            return context

        graph, context = memory.capture(forward)
        return _CapturedPrefill(rows, packed, inputs, context, graph)

    def fits(self, batch: Batch) -> bool:
        """Return True if a graph has room for the plan's tokens, and attention is not slower in it."""
        few = batch.num_tokens <= self._sizes[-1]
        return few and self._runner.attention.fits_graph(batch.query_lens, batch.start_pos + batch.query_lens)

    def forward(self, batch: Batch) -> ForwardOutput:
        """Replay a plan that fits."""
        runner = self._runner
        size = self._sizes[bisect_left(self._sizes, batch.num_tokens)]
        captured = self._captured[size]
        host = pad_inputs(step_inputs(batch), size, captured.rows, runner.state.scratch_slot, runner.state.max_seq_len)
        packed = pinned(np.concatenate(host))
        captured.packed[: len(packed)].copy_(packed, non_blocking=True)
        captured.graph.replay()
        # Copies, because the sampling may read these after the next step's inputs have been written.
        views = views_like(captured.packed, host)
        logits_indices, slots = views.logits_indices.long(), views.sampling_slots.long()
        states = self._states[logits_indices]
        return runner.output(batch, states, logits_indices, slots, captured.inputs, captured.context)

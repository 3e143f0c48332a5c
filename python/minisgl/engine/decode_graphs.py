"""CUDA graphs of the decode step: forward and sample, captured once for each of a few batch sizes.

A replay reads slots, lengths, tokens and pages from device state, so nothing but the row order is sent for it. A batch
of another size is padded with the scratch slot up to the next captured size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.model_attention import CapturedDecode
from minisgl.core import Batch, SamplingFlags
from minisgl.engine.capture import GraphMemory
from minisgl.engine.device import upload
from minisgl.engine.forward import ForwardOutput, StepRunner

_DRAWN = SamplingFlags.SAMPLED | SamplingFlags.FILTERED


@dataclass(slots=True)
class _Captured:
    """A batch size's graphs and what they read or write."""

    attention: CapturedDecode
    forward: torch.cuda.CUDAGraph
    sample: dict[SamplingFlags, tuple[torch.cuda.CUDAGraph, Tensor]]
    keep: object


def decode_graph_sizes(max_bs: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 256 and every 32 beyond: padding stays below an eighth of a large batch."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_bs + 1, 32)]
    return sorted({size for size in sizes if size < max_bs} | {max_bs})


class DecodeGraphs:
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
        # Of all sizes, each of which uses their beginning: what one step leaves is read before the next begins.
        model, device, scratch_slot = runner.model, runner.state.device, runner.state.scratch_slot
        self._rows = np.full(sizes[-1], scratch_slot, dtype=np.int32)  # what is in `_slots`
        self._slots = torch.full((sizes[-1],), scratch_slot, dtype=torch.int64, device=device)
        self._logits = torch.empty((sizes[-1], model.config.vocab_size), dtype=model.dtype, device=device)
        self._captured: dict[int, _Captured] = {}
        for size in reversed(sizes):
            self._captured[size] = self._capture(size, memory)
            captured()

    def _capture(self, size: int, memory: GraphMemory) -> _Captured:
        runner, slots, logits = self._runner, self._slots[:size], self._logits[:size]
        kv_lens = np.full(size, self._max_seq_len, dtype=np.int32)
        attention = runner.attention.capture_decode(size)

        def forward() -> object:
            context = runner.decode_context(slots, kv_lens, attention, logits)
            runner.model(context)
            return context

        def choose(flags: SamplingFlags) -> Tensor:
            return runner.sampler.sample(logits, slots, runner.state, flags)

        forward_graph, context = memory.capture(forward)
        samples = {flags: memory.capture(partial(choose, flags)) for flags in runner.sampler.graph_flags}
        return _Captured(attention, forward_graph, samples, context)

    def fits(self, batch: Batch) -> bool:
        """Whether the plan is a decode that a graph was captured for."""
        return batch.is_decode and len(batch.slots) <= self._sizes[-1]

    def forward(self, batch: Batch) -> ForwardOutput:
        """Replay the forward of a plan that fits. What it brings is overwritten by the next replay."""
        rows, size = len(batch.slots), self._size_for(batch)
        padded = np.full(size, self._runner.state.scratch_slot, dtype=np.int32)
        padded[:rows] = batch.slots
        if not np.array_equal(self._rows[:size], padded):
            self._slots[:size] = upload(padded, self._slots.device)
            self._rows[:size] = padded  # behind the upload, which may find no memory
        captured = self._captured[size]
        captured.attention.prepare(batch.start_pos)
        captured.forward.replay()
        return ForwardOutput(self._logits[:rows], self._slots[:rows])

    def sample(self, batch: Batch) -> Tensor:
        """The sampled tokens [rows] behind the same plan's forward, overwritten by the next replay.

        Not for plans whose rows are `processed`: the tables for that grow, so no graph may hold them.
        """
        graphs = self._captured[self._size_for(batch)].sample
        flags = batch.flags & _DRAWN
        graph, sampled = graphs[flags if flags in graphs else self._runner.sampler.graph_flags[-1]]
        graph.replay()
        return sampled[: len(batch.slots)]

    def _size_for(self, batch: Batch) -> int:
        """The smallest captured batch size that holds the plan's rows."""
        return self._sizes[bisect_left(self._sizes, len(batch.slots))]

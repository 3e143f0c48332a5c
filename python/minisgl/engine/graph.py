"""CUDA graphs of the decode step: forward and sample, captured once for each of a few batch sizes.

A replay reads slots, lengths, tokens and pages from device state, so nothing but the row order is sent for it. A batch
of another size is padded with the scratch slot up to the next captured size. A graph keeps no reference to the tensors
it reads: this object keeps everything that was alive at capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import GraphedDecode, Unplanned
from minisgl.core import Batch
from minisgl.engine.forward import Forwarded, StepRunner
from minisgl.engine.sampler import SampleKind
from minisgl.engine.state import upload

SAMPLE_KINDS = (SampleKind(True, False), SampleKind(False, False), SampleKind(False, True))


@dataclass(slots=True)
class _Captured:
    """A batch size's graphs and the tensors they read and write."""

    slots: Tensor
    attention: GraphedDecode
    forward: torch.cuda.CUDAGraph
    logits: Tensor
    sample: dict[SampleKind, tuple[torch.cuda.CUDAGraph, Tensor]]
    keep: object


def graph_sizes(max_bs: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 256 and every 32 beyond: padding stays below an eighth of a large batch."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_bs + 1, 32)]
    return sorted({size for size in sizes if size < max_bs} | {max_bs})


class DecodeGraphs:
    """Captures at construction, largest first, so that the smaller ones reuse its memory.

    `captured` is called with each size that is done.
    """

    def __init__(
        self, runner: StepRunner, sizes: list[int], max_seq_len: int, captured: Callable[[int], object]
    ) -> None:
        self._runner = runner
        self._device = runner.state.device
        self._sizes = sizes
        self._max_seq_len = max_seq_len
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, _Captured] = {}
        self._rows: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}  # what is in each size's `slots`
        for size in reversed(self._sizes):
            self._captured[size] = self._capture(size)
            captured(size)

    def _capture(self, size: int) -> _Captured:
        runner = self._runner
        slots = torch.full((size,), runner.state.scratch_slot, dtype=torch.int64, device=self._device)
        kv_lens = np.full(size, self._max_seq_len, dtype=np.int32)

        attention: GraphedDecode = Unplanned() if runner.fused else runner.attention.graphed_decode(size)
        attention.prepare(np.zeros(size, dtype=np.int32))

        def forward() -> tuple[Tensor, object]:
            ctx = runner.decode_context(slots, kv_lens, attention)
            return runner.model(ctx), ctx

        def choose(kind: SampleKind) -> Tensor:
            return runner.sampler.sample(logits, slots, runner.state, kind)

        forward()  # libraries allocate their workspaces at the first call, which a graph must not hold
        forward_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward_graph, pool=self._pool, stream=torch.cuda.current_stream()):
            logits, context = forward()
        samples = {}
        for kind in SAMPLE_KINDS:
            choose(kind)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                sampled = choose(kind)
            samples[kind] = (graph, sampled)
        return _Captured(slots, attention, forward_graph, logits, samples, context)

    def fits(self, batch: Batch) -> bool:
        """Whether the plan is a decode that a graph was captured for."""
        return batch.is_decode and len(batch.slots) <= self._sizes[-1]

    def forward(self, batch: Batch) -> Forwarded:
        """Replay the forward of a plan that fits. What it brings is overwritten by the next replay."""
        size = self._size_for(batch)
        captured = self._captured[size]
        padded = np.full(size, self._runner.state.scratch_slot, dtype=np.int32)
        padded[: len(batch.slots)] = batch.slots
        if not np.array_equal(self._rows.get(size, ()), padded):
            self._rows[size] = padded
            captured.slots.copy_(upload(padded, self._device))
        captured.attention.prepare(batch.starts)
        captured.forward.replay()
        rows = len(batch.slots)
        return Forwarded(captured.logits[:rows], captured.slots[:rows])

    def sample(self, batch: Batch) -> Tensor:
        """The sampled tokens [rows] behind the same plan's forward, overwritten by the next replay.

        Not for plans whose rows are `processed`: the tables for that grow, so no graph may hold them.
        """
        graph, sampled = self._captured[self._size_for(batch)].sample[SampleKind.of(batch)]
        graph.replay()
        return sampled[: len(batch.slots)]

    def _size_for(self, batch: Batch) -> int:
        """The smallest captured batch size that holds the plan's rows."""
        return self._sizes[bisect_left(self._sizes, len(batch.slots))]

"""All CUDA graphs of an engine, in one pool of memory: one step is over before the next begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl.core import Batch
from minisgl.engine.capture import GraphMemory
from minisgl.engine.decode_graphs import DecodeGraphs
from minisgl.engine.forward import StepRunner
from minisgl.engine.prefill_graphs import PrefillGraphs


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What is captured, both ascending."""

    decode: list[int]  # rows
    prefill: list[int]  # tokens; none where prefills run without graphs

    def __len__(self) -> int:
        return len(self.decode) + len(self.prefill)


class Graphs:
    """Captures at construction; `captured` is called after each graph, of prefills first, the largest of them first."""

    def __init__(self, runner: StepRunner, sizes: GraphSizes, max_seq_len: int, captured: Callable[[], object]) -> None:
        memory = GraphMemory()
        self._prefill = PrefillGraphs(runner, sizes.prefill, max_seq_len, memory, captured) if sizes.prefill else None
        self._decode = DecodeGraphs(runner, sizes.decode, max_seq_len, memory, captured)

    def decode(self, batch: Batch) -> DecodeGraphs | None:
        """What replays the plan if it is a decode that fits."""
        return self._decode if self._decode.fits(batch) else None

    def prefill(self, batch: Batch) -> PrefillGraphs | None:
        """What replays the forward of any other plan that fits."""
        return self._prefill if self._prefill is not None and self._prefill.fits(batch) else None

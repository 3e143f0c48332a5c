"""The step loop: scheduler decides, engine executes, and with overlap the host is one step behind the device."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from minisgl.core import Batch, Int32Array, StepLogprobs
from minisgl.scheduler.scheduler import Scheduler, StepReport


class StepResult(Protocol):
    """A step under way."""

    def tokens(self) -> Int32Array:
        """Wait for the step; the tokens that its sampling rows chose, in row order."""
        ...

    def logprobs(self) -> StepLogprobs | None:
        """Wait for the step; the log-probabilities that its plan asks for."""
        ...


class StepEngine(Protocol):
    """What executes plans: the Engine, or a simulation."""

    def execute(self, batch: Batch) -> StepResult:
        """Launch a step behind those launched before, and return at once."""
        ...


class StepLoop:
    """Launches step n + 1 before it reads the tokens of step n (`overlap`), or after."""

    def __init__(self, scheduler: Scheduler, engine: StepEngine, *, overlap: bool) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._depth = 1 if overlap else 0
        self._in_flight: deque[tuple[Batch, StepResult]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def step(self) -> StepReport:
        """Launch a step if one can be planned, then finish the oldest beyond the depth of the overlap."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._in_flight.append((batch, self._engine.execute(batch)))
        if self._in_flight and (batch is None or len(self._in_flight) > self._depth):
            oldest, result = self._in_flight.popleft()
            self.scheduler.complete(oldest, result.tokens(), result.logprobs())
        return self.scheduler.report()

"""The step loop: the scheduler plans, the engine executes, and with overlap the host is one step behind the device.

A step is two launches, forward and sampling. Only the sampling may wait for the host: if a grammar constrains a row,
its allowed tokens depend on the tokens of the step before, so the host reads these and fills the grammar bitmask while
the device works on the forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, process_time, sleep
from typing import Protocol

from minisgl.core import AnyArray, Batch, DeviceOutOfMemory, Int32Array, PendingStep, StepResult
from minisgl.message.control import Progress
from minisgl.message.to_detokenizer import StepOutput
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.steps.trace import StepTrace

COMPILE_POLL = 5e-4  # seconds between polls of a grammar that is being compiled, when there is nothing else to do


class StepEngine(Protocol):
    """Executor of plans: the Engine, the LeadingEngine of several ranks, or a simulation.

    If the device has too little memory for a step, a launch or the result raises DeviceOutOfMemory.
    """

    @property
    def bitmask(self) -> Int32Array:
        """Memory for the grammar bitmask of one step: [rows, ceil(vocab_size / 32)].

        Bit i of word w says that the row may choose id 32 w + i. It may be overwritten once all steps before are
        complete.
        """

    def forward(self, batch: Batch) -> None:
        """Launch a step's forward after the earlier launches, and return at once."""

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> PendingStep:
        """Launch the sampling of the step whose forward was launched last, and return at once.

        `bitmask`: the first rows of `self.bitmask`, one for each row that samples, if the step is constrained.
        """


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: Batch
    pending: PendingStep
    at: float  # seconds on the loop's clock


@dataclass(slots=True)
class StepCounts:
    """Number of steps that a rank has begun to launch and has finished, for the supervisor's hang detection."""

    begun: int = 0
    finished: int = 0

    def progress(self, computes_here: bool) -> Progress:
        """Return a rank's answer to a ping; `computes_here`: its device is the CPU."""
        return Progress(self.begun, self.finished, process_time() if computes_here else 0.0)


class StepLoop:
    """Launches step n + 1 before it reads the tokens of step n (`overlap`), or after.

    A GPU measures the time of each step itself. Otherwise `clock` counts it, in seconds, from a step's launch, or from
    the end of the step before if that is later, to its end. `retries`: if the device had too little memory for a step,
    its requests continue in smaller steps. That is impossible with several ranks, because the others may wait in a
    collective for the one that failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: StepEngine,
        *,
        overlap: bool,
        retries: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._depth = 1 if overlap else 0
        self._retries = retries
        self.counts = StepCounts()
        self._launching: Batch | None = None
        self._in_flight: deque[_Launched] = deque()
        self._clock = clock
        self._completed_at = 0.0
        self.trace: StepTrace | None = None  # set while the glass box is watched
        self.wait: Callable[[PendingStep], StepResult[AnyArray]] = _wait  # an LLM lets Ctrl-C end it
        self._failure: DeviceOutOfMemory | None = None  # failure of a step that cannot be taken back

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def step(self) -> StepOutput:
        """Launch a step if one can be planned, then complete the oldest step if more are in flight than overlap allows.

        Example with overlap: two sequences, of which the second ends by a stop token that is read one step late.

        | call | launches            | completes                                          |
        |------|---------------------|----------------------------------------------------|
        | 1    | step 0: 1 and 2     |                                                    |
        | 2    | step 1: 1 and 2     | step 0: a token each                               |
        | 3    | step 2: 1 and 2     | step 1: the token of 2 ends it                     |
        | 4    | step 3: 1           | step 2: drops the token of 2, gives its slot back  |

        DeviceOutOfMemory if a step failed and cannot be retried; every later call raises it again.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._launch_and_complete()
        except DeviceOutOfMemory as error:
            if not self._retries:
                self._failure = error
                raise
            self._take_back()
        return self.scheduler.take_output()

    def _launch_and_complete(self) -> None:
        batch = self._launching = self.scheduler.schedule()
        if batch is not None:
            self.counts.begun = batch.step + 1
            at = self._clock()
            self._in_flight.append(_Launched(batch, self._launch(batch), at))
            self._launching = None
        elif not self._in_flight and self.scheduler.is_compiling:
            sleep(COMPILE_POLL)
        if self._in_flight and (batch is None or len(self._in_flight) > self._depth):
            self._complete_oldest()

    def _take_back(self) -> None:
        """Complete the steps before the one that failed; undo that one and all later ones."""
        with suppress(DeviceOutOfMemory):
            while self._in_flight:
                self._complete_oldest()
        failed = [launched.batch for launched in self._in_flight]
        self._in_flight.clear()
        if self._launching is not None:
            failed.append(self._launching)
            self._launching = None
        self.counts.finished = failed[-1].step + 1
        self.scheduler.take_back(failed)

    def _launch(self, batch: Batch) -> PendingStep:
        self._engine.forward(batch)
        if not batch.constrained:
            return self._engine.sample(batch)
        while self._in_flight:
            self._complete_oldest()
        bitmask = self._engine.bitmask[: int(batch.needs_sample.sum())]
        self.scheduler.fill(bitmask, batch)
        return self._engine.sample(batch, bitmask)

    def _complete_oldest(self) -> None:
        oldest = self._in_flight[0]
        result = self.wait(oldest.pending)
        self._in_flight.popleft()  # after the wait, which Ctrl-C may interrupt
        self.counts.finished = oldest.batch.step + 1
        begin, self._completed_at = max(oldest.at, self._completed_at), self._clock()
        seconds = self._completed_at - begin if result.seconds is None else result.seconds
        self.scheduler.record(oldest.batch, seconds)
        if self.trace is not None:
            self.trace.add(oldest.batch, self.scheduler.seq_ids(oldest.batch), begin, self._completed_at)
        self.scheduler.complete(oldest.batch, result)


def _wait(pending: PendingStep) -> StepResult[AnyArray]:
    return pending()

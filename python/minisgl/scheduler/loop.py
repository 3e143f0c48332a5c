"""The step loop: scheduler decides, engine executes, and with overlap the host is one step behind the device.

A step is two launches, forward and sampling. Only the sampling may wait for the host: where a grammar constrains some
row, the tokens it may choose depend on those of the step before, so the host reads these and fills the grammar bitmask
while the device works on the forward.

With tensor parallelism rank 0 decides, and the others execute what they are sent: the same plans in the same order.
The logits are gathered from all ranks, so they are the same bits everywhere, and so is the token that each rank samples
from them: no token has to be sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, process_time, sleep
from typing import Protocol, TypeVar

from minisgl.config import SchedulerConfig
from minisgl.core import Batch, DeviceOutOfMemory, Int32Array, PendingStep
from minisgl.kvcache import make_cache
from minisgl.kvcache.base import CacheObserver
from minisgl.kvcache.snapshots import SnapshotStore
from minisgl.kvcache.window import WindowGroup, WindowPool
from minisgl.limits import Limits
from minisgl.message.control import Progress
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_detokenizer import StepOutput
from minisgl.message.to_scheduler import Bitmask, ToRank
from minisgl.models.config.model_config import ModelConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step_trace import StepTrace
from minisgl.step_cost import StepCost
from minisgl.structured_output.protocol import Grammars

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMPILE_POLL = 5e-4  # seconds between looks at a grammar that is being compiled, when there is nothing else to do
MAX_IN_FLIGHT = 4  # steps that a following rank launches ahead of its device


class StepEngine(Protocol):
    """Executor of plans: the Engine, all ranks together, or a simulation.

    Where the device has too little memory for a step, DeviceOutOfMemory comes from a launch or from the result.
    """

    @property
    def bitmask(self) -> Int32Array:
        """Memory for a step's grammar bitmask, one for all steps: [rows, ceil(vocab_size / 32)].

        Bit i of word w says that the row may choose id 32 w + i. It may be written when all steps before are complete.
        """

    def forward(self, batch: Batch) -> None:
        """Launch a step's forward behind what was launched before, and return at once."""

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> PendingStep:
        """Launch the sampling of the step whose forward was launched last, and return at once.

        `bitmask`: the beginning of `self.bitmask`, a row for each that samples, if the step is constrained.
        """


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: Batch
    pending: PendingStep
    at: float  # seconds on the loop's clock


@dataclass(slots=True)
class StepCounts:
    """Steps that a rank has begun to launch, and those that it has finished, for whoever watches it."""

    begun: int = 0
    finished: int = 0

    def progress(self, computes_here: bool) -> Progress:
        """Return a rank's answer to a ping; `computes_here`: its device is the CPU."""
        return Progress(self.begun, self.finished, process_time() if computes_here else 0.0)


class StepLoop:
    """Launches step n + 1 before it reads the tokens of step n (`overlap`), or after.

    `clock` counts seconds. A step ran from its launch, or from the end of the step before it, to its own end.
    `retries`: the requests of a step for which the device had too little memory go on in smaller ones. With several
    ranks they cannot: the others may wait in a collective for the one that failed.
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
        self.trace: StepTrace | None = None  # while somebody looks
        self._failure: DeviceOutOfMemory | None = None  # failure of a step that cannot be taken back

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def step(self) -> StepOutput:
        """Launch a step if one can be planned, then finish the oldest beyond the depth of the overlap.

        With overlap, two sequences of which the second ends by its stop token, found a step late:

        | call | launches            | completes                                          |
        |------|---------------------|----------------------------------------------------|
        | 1    | step 0: 1 and 2     |                                                    |
        | 2    | step 1: 1 and 2     | step 0: a token each                               |
        | 3    | step 2: 1 and 2     | step 1: the token of 2 ends it                     |
        | 4    | step 3: 1           | step 2: drops the token of 2, gives its slot back  |

        DeviceOutOfMemory if a step failed and is not to be retried; every later call raises it again.
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
        return self.scheduler.report()

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
        """Complete the steps before the one that failed; undo it and those behind."""
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
        result = oldest.pending()
        self._in_flight.popleft()  # not before: Ctrl-C may end the wait
        self.counts.finished = oldest.batch.step + 1
        begin, self._completed_at = max(oldest.at, self._completed_at), self._clock()
        self.scheduler.record(oldest.batch, self._completed_at - begin)
        if self.trace is not None:
            self.trace.add(oldest.batch, self.scheduler.seq_ids(oldest.batch), begin, self._completed_at)
        self.scheduler.complete(oldest.batch, result)


class LeadingEngine:
    """Rank 0's engine, with the other ranks in tow."""

    def __init__(self, engine: StepEngine, followers: Sequence[Outbox[ToRank]]) -> None:
        self._engine = engine
        self._followers = followers

    @property
    def bitmask(self) -> Int32Array:
        return self._engine.bitmask

    def forward(self, batch: Batch) -> None:
        self._send(batch)
        self._engine.forward(batch)

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> PendingStep:
        if bitmask is not None:
            self._send(Bitmask(bitmask))
        return self._engine.sample(batch, bitmask)

    def _send(self, message: ToRank) -> None:
        for follower in self._followers:
            follower.send(message)


def follow(engine: StepEngine, inbox: Inbox[ToRank], counts: StepCounts) -> None:
    """Execute the plans of rank 0 for ever."""
    in_flight: deque[PendingStep] = deque()
    while True:
        batch = _expect(Batch, inbox.receive())
        counts.begun = batch.step + 1
        engine.forward(batch)
        bitmask = None
        if batch.constrained:
            words = _expect(Bitmask, inbox.receive()).words
            # Memory for the bitmask is free when the steps before are complete.
            while in_flight:
                in_flight.popleft()()
            bitmask = engine.bitmask[: len(words)]
            bitmask[:] = words
        in_flight.append(engine.sample(batch, bitmask))
        if len(in_flight) > MAX_IN_FLIGHT:
            in_flight.popleft()()


def _expect(kind: type[T], message: ToRank) -> T:
    """Return the message; RuntimeError if rank 0 sent another kind: a bitmask stands right behind its plan."""
    if not isinstance(message, kind):
        raise RuntimeError(f"rank 0 sent {type(message).__name__} in place of {kind.__name__}")
    return message


class SchedulableEngine(StepEngine, Protocol):
    """Engine with the facts that a scheduler for it must know."""

    page_size: int
    num_pages: int
    num_slots: int
    num_snapshots: int  # snapshots of a hybrid model's states
    window: WindowGroup | None  # layers with pages of their own
    limits: Limits
    step_cost: StepCost | None


def reuses_prefixes(config: SchedulerConfig, model: ModelConfig) -> bool:
    """Return True if prompts are to begin with what is cached of earlier ones."""
    return config.cache == "radix" and (model.pooling is None or model.pooling.reuses_prefixes)


def make_loop(
    config: SchedulerConfig,
    engine: SchedulableEngine,
    model: ModelConfig,
    followers: Sequence[Outbox[ToRank]] = (),
    grammars: Grammars | None = None,
    observer: CacheObserver | None = None,
) -> StepLoop:
    """Make the step loop of rank 0, which sends every plan to `followers`. Without `grammars` it serves none.

    `observer` learns which prefixes are cached.
    """
    cache, snapshots = config.cache, None
    if not reuses_prefixes(config, model) and cache == "radix":
        logger.info("no prefix is reused: a mean needs the states of all tokens")
        cache = "naive"
    if model.is_hybrid and cache == "radix":
        if engine.num_snapshots:
            snapshots = SnapshotStore(engine.num_snapshots, engine.num_pages)
        else:
            logger.info("no prefix is reused: there is no room for snapshots of the recurrent layers' states")
            cache = "naive"
    windows = None if engine.window is None else WindowPool(engine.window, engine.num_pages)
    observers = [told for told in (snapshots, windows, observer) if told is not None]
    scheduler = Scheduler(
        config,
        cache=make_cache(cache, engine.page_size, *observers),
        num_pages=engine.num_pages,
        num_slots=engine.num_slots,
        max_seq_len=engine.limits.max_seq_len,
        eos_token_ids=model.eos_token_ids,
        grammars=grammars,
        cost=engine.step_cost,
        pools=model.pooling is not None,
        snapshots=snapshots,
        windows=windows,
    )
    if not followers:
        return StepLoop(scheduler, engine, overlap=config.overlap)
    return StepLoop(scheduler, LeadingEngine(engine, followers), overlap=config.overlap, retries=False)

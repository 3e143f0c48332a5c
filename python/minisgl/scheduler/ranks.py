"""Tensor parallelism as the scheduler sees it: rank 0 decides, the others execute what they are sent.

Every rank runs the same plans in the same order. The logits are gathered from all ranks, so they are the same bits
everywhere, and so is the token that each rank samples from them: no token has to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl.core import Batch, Int32Array, StepResult
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_rank import Mask, ToRank
from minisgl.scheduler.loop import StepEngine, StepForward

MAX_IN_FLIGHT = 4  # steps that a following rank launches ahead of its device


class LeadingEngine:
    """Rank 0's engine, with the other ranks in tow."""

    def __init__(self, engine: StepEngine, followers: Sequence[Outbox[ToRank]]) -> None:
        self._engine = engine
        self._followers = followers

    def execute(self, batch: Batch) -> StepResult:
        self._send(batch)
        return self._engine.execute(batch)

    def forward(self, batch: Batch) -> StepForward:
        self._send(batch)
        return _LeadingForward(self._engine.forward(batch), self._send)

    def _send(self, message: ToRank) -> None:
        for follower in self._followers:
            follower.send(message)


@dataclass(frozen=True, slots=True)
class _LeadingForward:
    """A forward on all ranks."""

    own: StepForward
    send: Callable[[ToRank], None]

    @property
    def mask(self) -> Int32Array:
        return self.own.mask

    def sample(self) -> StepResult:
        self.send(Mask(self.own.mask))
        return self.own.sample()


def follow(engine: StepEngine, inbox: Inbox[ToRank]) -> None:
    """Execute plans for ever."""
    in_flight: deque[StepResult] = deque()
    while True:
        batch = inbox.receive()
        assert isinstance(batch, Batch), "a mask comes behind its plan"
        if batch.constrained:
            forward, mask = engine.forward(batch), inbox.receive()
            assert isinstance(mask, Mask), "a plan with constraints is followed by its mask"
            # The memory for masks is free when the step before is complete.
            while in_flight:
                in_flight.popleft().tokens()
            forward.mask[:] = mask.words
            in_flight.append(forward.sample())
        else:
            in_flight.append(engine.execute(batch))
        if len(in_flight) > MAX_IN_FLIGHT:
            in_flight.popleft().tokens()

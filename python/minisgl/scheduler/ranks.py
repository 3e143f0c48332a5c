"""Steps on several tensor-parallel ranks.

Rank 0 plans, and the other ranks execute the plans that it sends, in the same order. Every rank gathers the logits of
all ranks, or reads what sampling needs from their shards. Both are the same bits everywhere, and so is the token that
each rank samples from them: no token is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from minisgl.core import Batch, Int32Array, PendingStep
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_scheduler import Bitmask, ToRank
from minisgl.scheduler.loop import StepCounts, StepEngine

T = TypeVar("T")

MAX_IN_FLIGHT = 4  # steps that a following rank launches ahead of its device


class LeadingEngine:
    """Rank 0's engine, which sends each plan to the other ranks before it launches it."""

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
    """Execute the plans of rank 0, without end."""
    in_flight: deque[PendingStep] = deque()
    while True:
        batch = _expect(Batch, inbox.receive())
        counts.begun = batch.step + 1
        engine.forward(batch)
        bitmask = None
        if batch.constrained:
            words = _expect(Bitmask, inbox.receive()).words
            # The memory for bitmasks may be overwritten once the steps before are complete.
            while in_flight:
                in_flight.popleft()()
            bitmask = engine.bitmask[: len(words)]
            bitmask[:] = words
        in_flight.append(engine.sample(batch, bitmask))
        if len(in_flight) > MAX_IN_FLIGHT:
            in_flight.popleft()()


def _expect(kind: type[T], message: ToRank) -> T:
    """Return the message; RuntimeError if it is of another kind: a bitmask comes directly after its plan."""
    if not isinstance(message, kind):
        raise RuntimeError(f"rank 0 sent {type(message).__name__} in place of {kind.__name__}")
    return message

"""Tensor parallelism as the scheduler sees it: rank 0 decides, the others execute what they are sent.

Every rank runs the same plans in the same order. The logits are gathered from all ranks, so they are the same bits
everywhere, and so is the token that each rank samples from them: no token has to be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minisgl.core import Batch
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_rank import Plan, pack_plan, unpack_plan
from minisgl.scheduler.loop import StepEngine, StepResult

MAX_IN_FLIGHT = 4  # steps that a following rank launches ahead of its device


class LeadingEngine:
    """Rank 0's engine, with the other ranks in tow."""

    def __init__(self, engine: StepEngine, followers: Sequence[Outbox[Plan]]) -> None:
        self._engine = engine
        self._followers = followers

    def execute(self, batch: Batch) -> StepResult:
        plan = pack_plan(batch)
        for follower in self._followers:
            follower.send(plan)
        return self._engine.execute(batch)


def follow(engine: StepEngine, inbox: Inbox[Plan]) -> None:
    """Execute plans for ever."""
    in_flight: deque[StepResult] = deque()
    while True:
        in_flight.append(engine.execute(unpack_plan(inbox.receive())))
        if len(in_flight) > MAX_IN_FLIGHT:
            in_flight.popleft().tokens()

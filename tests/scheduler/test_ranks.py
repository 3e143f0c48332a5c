"""Plans of rank 0 reach the other ranks as they were, whatever the step asks for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from minisgl.core import Batch, Int32Array, NewRow, ScoredTokens
from minisgl.message.socket import Addresses, Inbox, Outbox
from minisgl.message.to_scheduler import Bitmask, ToRank
from minisgl.sampling_params import SamplingFlags, SamplingParams
from minisgl.scheduler.loop import StepCounts
from minisgl.scheduler.ranks import MAX_IN_FLIGHT, LeadingEngine, follow


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


PLAN = Batch(
    step=3,
    slots=ids(4, 1),
    start_pos=ids(0, 9),
    query_lens=ids(5, 1),
    needs_sample=np.array([False, True]),
    new_pages=ids(4, 0, 7, 1, 2, 8).reshape(2, 3),
    new_rows=[NewRow(4, ids(5, 6, 7, 8, 9), ids(), SamplingParams(stop=("x",)), -(2**63), 5, (2, 3), ids(8))],
    flags=SamplingFlags.SAMPLED | SamplingFlags.CONSTRAINED,
    logprobs=ScoredTokens(ids(0), 2, ids(4, 0), 1),
    state_copies=[(1, 9), (11, 4)],
)
DECODE = Batch(0, ids(0), ids(5), ids(1), np.array([True]), np.zeros((0, 3), dtype=np.int32))
BITMASK = Bitmask(np.array([[-1, 2**31 - 1, 0], [0, 1, 2]], dtype=np.int32)[:, ::2])


def assert_same(ours: object, theirs: object) -> None:
    if isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray)
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert (ours == theirs).all()
        return
    assert type(ours) is type(theirs)
    if isinstance(ours, list):
        for mine, other in zip(ours, theirs, strict=True):  # type: ignore[call-overload]
            assert_same(mine, other)
    elif isinstance(ours, msgspec.Struct):
        for mine, other in zip(msgspec.structs.astuple(ours), msgspec.structs.astuple(theirs), strict=True):  # type: ignore[arg-type]
            assert_same(mine, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("message", [PLAN, DECODE, BITMASK])
def test_a_message_arrives_as_it_was(message: ToRank, tmp_path: Path) -> None:
    address = Addresses(str(tmp_path)).rank(1)
    with zmq.Context() as context:
        inbox: Inbox[ToRank] = Inbox(context, address, ToRank)
        outbox: Outbox[ToRank] = Outbox(context, address)
        outbox.send(message)
        assert inbox.has_message(10)
        received = inbox.receive()
        context.destroy(linger=0)
    assert_same(message, received)


@pytest.mark.parametrize(
    "annotation",
    [np.ndarray, Int32Array, np.ndarray[Any, np.dtype[np.int32]], np.ndarray[tuple[int, ...], np.dtype[np.int32]]],
)
def test_an_array_arrives_however_its_field_is_annotated(annotation: object, tmp_path: Path) -> None:
    """NumPy 2.5 on Python 3.12 hands msgspec another object for NDArray[np.int32] than the one in the source."""
    message_type = msgspec.defstruct("Message", [("array", annotation)])
    address = Addresses(str(tmp_path)).rank(1)
    with zmq.Context() as context:
        inbox: Inbox[msgspec.Struct] = Inbox(context, address, message_type)
        outbox: Outbox[msgspec.Struct] = Outbox(context, address)
        outbox.send(message_type(ids(1, -2, 2**31 - 1).reshape(1, 3)))
        assert inbox.has_message(10)
        received = inbox.receive()
        context.destroy(linger=0)
    assert_same(message_type(ids(1, -2, 2**31 - 1).reshape(1, 3)), received)


class Stop(Exception):
    """There are no more messages."""


class FollowedEngine:
    """Follows by the rule: its memory for bitmasks is one, and read until the step is complete."""

    def __init__(self) -> None:
        self.in_flight: list[int] = []  # steps whose sampling may still read the bitmask
        self.sampled: list[tuple[int, list[int]]] = []  # (step, its bitmask)
        self.longest = 0
        self.bitmask = GuardedBitmask(self)
        self._forwarded: int | None = None

    def forward(self, batch: Batch) -> None:
        assert self._forwarded is None, "the step before was not sampled"
        self._forwarded = batch.step

    def sample(self, batch: Batch, bitmask: GuardedBitmask | None = None) -> Any:
        step, self._forwarded = self._forwarded, None
        assert step == batch.step
        if bitmask is not None:
            self.sampled.append((step, bitmask.words))
        self.in_flight.append(step)
        self.longest = max(self.longest, len(self.in_flight))
        return lambda: self.in_flight.remove(step)


class GuardedBitmask:
    """Bitmask that may only be written when no step can read it."""

    def __init__(self, engine: FollowedEngine) -> None:
        self._engine = engine
        self.words: list[int] = []

    def __getitem__(self, _: slice) -> GuardedBitmask:
        return self

    def __setitem__(self, _: slice, words: Int32Array) -> None:
        assert self._engine.in_flight == [], "a step under way still reads the bitmask"
        self.words = words.tolist()


def test_a_following_rank_waits_for_the_steps_that_read_the_bitmask_before_it_writes_the_next() -> None:
    constrained = [0, 1, 3, 6, 7, 20]
    messages: list[ToRank] = []
    for step in range(21):
        flags = SamplingFlags.CONSTRAINED if step in constrained else SamplingFlags(0)
        batch = msgspec.structs.replace(DECODE, step=step, flags=flags)
        messages += [batch, Bitmask(ids(step))] if batch.constrained else [batch]
    incoming = iter(messages)

    def receive() -> ToRank:
        if (message := next(incoming, None)) is None:
            raise Stop
        return message

    engine, counts = FollowedEngine(), StepCounts()
    with pytest.raises(Stop):
        follow(engine, SimpleNamespace(receive=receive), counts)  # type: ignore[arg-type]
    assert counts.begun == 21
    assert engine.sampled == [(step, [step]) for step in constrained]
    assert engine.longest > MAX_IN_FLIGHT  # otherwise it would hold for want of overlap


def test_the_leading_rank_sends_each_plan_and_its_bitmask_after_it() -> None:
    engine, sent = FollowedEngine(), list[ToRank]()
    leading = LeadingEngine(engine, [SimpleNamespace(send=sent.append)])  # type: ignore[arg-type, list-item]
    constrained = msgspec.structs.replace(DECODE, step=1, flags=SamplingFlags.CONSTRAINED)
    leading.forward(DECODE)
    leading.sample(DECODE)
    leading.forward(constrained)
    assert [*map(id, sent)] == [id(DECODE), id(constrained)], "the other ranks compute while rank 0 fills the bitmask"
    leading.sample(constrained, engine.bitmask)  # type: ignore[arg-type]
    (_, _, bitmask) = sent
    assert isinstance(bitmask, Bitmask)
    assert bitmask.words is engine.bitmask  # type: ignore[comparison-overlap]
    assert engine.in_flight == [0, 1]


def test_a_busy_receiver_gets_all_messages_in_order(tmp_path: Path) -> None:
    """ZeroMQ's own bounds would refuse a message after some thousand: admission bounds the queues instead."""
    address = Addresses(str(tmp_path)).rank(1)
    with zmq.Context() as context:
        inbox: Inbox[int] = Inbox(context, address, int)
        outbox: Outbox[int] = Outbox(context, address)
        for number in range(10_000):
            outbox.send(number)
        assert [inbox.receive() for _ in range(10_000)] == list(range(10_000))
        context.destroy(linger=0)


def test_only_arrays_are_sent(tmp_path: Path) -> None:
    with zmq.Context() as context:
        outbox: Outbox[object] = Outbox(context, Addresses(str(tmp_path)).rank(1))
        with pytest.raises(NotImplementedError, match="object"):
            outbox.send(object())
        context.destroy(linger=0)

"""What rank 0 plans reaches the other ranks as it was, whatever the step asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from minisgl.core import Batch, EnteringRow, Int32Array, LogprobPlan, SamplingParams
from minisgl.message.socket import Addresses, Inbox, Outbox
from minisgl.message.to_rank import Mask, ToRank


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


PLAN = Batch(
    step=3,
    slots=ids(4, 1),
    starts=ids(0, 9),
    lengths=ids(5, 1),
    samples=np.array([False, True]),
    new_pages=ids(4, 0, 7, 1, 2, 8).reshape(2, 3),
    entering=[EnteringRow(4, ids(5, 6, 7, 8, 9), ids(), SamplingParams(stop=("x",)), -(2**63), 5, (2, 3))],
    greedy=False,
    logprobs=LogprobPlan(ids(0), 2, ids(4, 0), 1),
    constrained=True,
)
DECODE = Batch(0, ids(0), ids(5), ids(1), np.array([True]), np.zeros((0, 3), dtype=np.int32))
MASK = Mask(np.array([[-1, 2**31 - 1, 0], [0, 1, 2]], dtype=np.int32)[:, ::2])


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


@pytest.mark.parametrize("message", [PLAN, DECODE, MASK])
def test_a_message_arrives_as_it_was(message: ToRank, tmp_path: Path) -> None:
    address = Addresses(str(tmp_path)).rank(1)
    with zmq.Context() as context:
        inbox: Inbox[ToRank] = Inbox(context, address, ToRank)
        outbox: Outbox[ToRank] = Outbox(context, address)
        outbox.send(message)
        received = inbox.receive_within(10)
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
        received = inbox.receive_within(10)
        context.destroy(linger=0)
    assert_same(message_type(ids(1, -2, 2**31 - 1).reshape(1, 3)), received)


def test_only_arrays_are_sent(tmp_path: Path) -> None:
    with zmq.Context() as context:
        outbox: Outbox[object] = Outbox(context, Addresses(str(tmp_path)).rank(1))
        with pytest.raises(NotImplementedError, match="object"):
            outbox.send(object())
        context.destroy(linger=0)

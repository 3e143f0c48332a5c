"""JSON of answers that may have millions of log-probabilities, encoded without holding the GIL for long.

msgspec encodes an object in one call, during which the event loop waits even if the call is in a thread: 200 MB take a
tenth of a second, and the objects from which they are made keep the garbage collector busy for longer. So a long list
is encoded a few values at a time, as a `JsonList`, and its pieces are put into the answer afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from minisgl.server.api.answers.writer_thread import let_others_pass

VALUES_A_PIECE = 256
_HOLE = b"\x00"  # takes the place of a JsonList; JSON has no such byte, not even in a string


class JsonList:
    """List whose values are encoded as they are added. A struct's field may have one in place of a list."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    @classmethod
    def of(cls, values: Iterable[Any]) -> JsonList:
        """Encode values, a few of which exist at a time."""
        result = cls()
        for some in slices(values):
            result.add(some)
        return result

    def add(self, values: list[Any]) -> None:
        """Add values, which should be few."""
        if values:
            self._pieces += (b"," if self._pieces else b"[", msgspec.json.encode(values)[1:-1])

    def pieces(self) -> list[bytes]:
        """Return parts of its JSON, in order."""
        return [*self._pieces, b"]"] if self._pieces else [b"[]"]


def slices(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the values in lists of `VALUES_A_PIECE`, between which a large answer lets others pass."""
    values = iter(values)
    while some := list(islice(values, VALUES_A_PIECE)):
        yield some
        let_others_pass()


def encode_large(data: msgspec.Struct, before: bytes = b"", after: bytes = b"") -> bytes:
    """Return the JSON of data that may have JsonLists, between the bytes `before` and `after`."""
    lists: list[JsonList] = []
    encoded = msgspec.json.encode(data, enc_hook=partial(_leave_hole, lists))
    first, *others = encoded.split(_HOLE)
    pieces = [before, first]
    for one, following in zip(lists, others, strict=True):
        pieces += [*one.pieces(), following]
    return b"".join([*pieces, after])  # which releases the GIL if it takes long


def _leave_hole(lists: list[JsonList], value: Any) -> msgspec.Raw:
    if not isinstance(value, JsonList):
        raise NotImplementedError(f"{type(value).__name__} has no JSON")
    lists.append(value)
    return msgspec.Raw(_HOLE)

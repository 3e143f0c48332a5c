"""Counts of the JSON values in a body while it arrives, so that one which would take long to read is refused unread.

Parsing JSON holds the GIL, in a thread too, and its cost is that of the objects it makes, not of the bytes: 4 MB of
text are 5 ms, 4 MB of nested arrays half a second. Counting takes some 5 ns a byte, spread over the arrival.
"""

from __future__ import annotations

from minisgl.server.api.http.errors import too_many_values

MAX_VALUES = 65_536  # strings (names of fields are some), objects and arrays
MAX_ITEMS = 262_144  # separated by commas: token ids are most of them


class BodyScan:
    """Counts of a body of which `feed` gets the pieces; exact up to the first syntax error, where parsing ends.

    `values` are strings, objects and arrays, `items` the commas between them. `_held` is a backslash whose character is
    in the next piece.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self.values = 0
        self.items = 0
        self._in_string = False
        self._held = b""

    def feed(self, piece: bytes | bytearray) -> None:
        """Count on; ApiError once there are more values or items than allowed."""
        data = self._held + piece
        num_backslashes = len(data) - len(data.rstrip(b"\\"))
        self._held = b"\\" * (num_backslashes % 2)
        data = data.removesuffix(self._held).replace(b"\\\\", b"").replace(b'\\"', b"")
        num_quotes = data.count(b'"')
        self.values += (num_quotes + self._in_string) // 2  # strings that end here
        self._check()  # before a list is made of so many
        outside = b"".join(data.split(b'"')[self._in_string :: 2])
        self._in_string ^= num_quotes % 2 == 1
        self.values += outside.count(b"[") + outside.count(b"{")
        self.items += outside.count(b",")
        self._check()

    def _check(self) -> None:
        if self.values > MAX_VALUES:
            raise too_many_values(f"{MAX_VALUES} strings, objects and arrays")
        if self.items > self._max_items:
            raise too_many_values(f"{self._max_items} list items and fields")

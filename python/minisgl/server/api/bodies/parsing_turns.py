"""Order in which bodies that have come at the same time are parsed, so that they are not all parsed in one turn.

Turns are those of the event loop, in which all streams wait. A large body takes up to 50 ms in each of several turns,
so one is parsed at a time. Small ones take 1 or 2 ms, and several begin in a turn: with one at a time, 100 of them
beside a few large bodies, or many streams, would wait for hundreds of long turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from minisgl.server.api.http.middleware import SMALL_BODY

# Of small bodies, between two calls of `_next_turn`. There is one in a turn, so a turn may begin twice as many.
BYTES_AT_ONCE = 2 * SMALL_BODY


class ParsingTurns:
    """Lets bodies be parsed in order of arrival: large ones one by one, small ones as many as a turn may begin."""

    def __init__(self) -> None:
        self._large = asyncio.Lock()
        self._begun = 0  # bytes of the small bodies that have begun since the last `_next_turn`
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()  # small bodies and their sizes

    @asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """Wait until a body of so many bytes may be parsed, which must be done within the `async with` block."""
        if size > SMALL_BODY:
            async with self._large:
                yield
            return
        if self._waiting or not self._fits(size):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, size))
            await turn
        else:
            self._begin(size)
        yield

    def _fits(self, size: int) -> bool:
        return self._begun + size <= BYTES_AT_ONCE

    def _begin(self, size: int) -> None:
        """Count a small body that begins."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._begun += size

    def _next_turn(self) -> None:
        self._begun = 0
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, size = self._waiting.popleft()
            if not turn.cancelled():
                self._begin(size)
                turn.set_result(None)

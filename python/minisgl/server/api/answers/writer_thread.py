"""Thread that writes the answers that would hold the event loop up.

It is the only one, because each competes with the loop for the GIL. The largest answer takes 20 s. So between two of
its pieces the thread writes the smaller answers that have come meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import get_ident


class WriterThread:
    """Writes answers in order of arrival; small ones interrupt a large one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "answer-writer")
        self._small: deque[Callable[[], None]] = deque()  # answers that are written next, in order of arrival
        self._writes_large: int | None = None  # number of the thread while it writes a large answer, else None

    async def run(self, write: Callable[[], bytes], *, is_large: bool) -> bytes:
        """Return what `write` returns."""
        written: Future[bytes] = Future()
        job = partial(_run, write, written)
        if is_large:
            self._thread.submit(self._run_large, job)
        else:
            self._small.append(job)
            self._thread.submit(self._run_small)
        return await asyncio.wrap_future(written)

    def between_pieces(self) -> None:
        """Write the small answers that wait, if a large one has called this."""
        if self._writes_large == get_ident():
            self._writes_large = None  # small ones have pieces, too
            self._run_small()
            self._writes_large = get_ident()

    def _run_large(self, job: Callable[[], None]) -> None:
        self._writes_large = get_ident()
        job()
        self._writes_large = None

    def _run_small(self) -> None:
        while self._small:
            self._small.popleft()()


def _run(write: Callable[[], bytes], written: Future[bytes]) -> None:
    if not written.set_running_or_notify_cancel():
        return
    try:
        written.set_result(write())
    except Exception as error:  # belongs to the one who waits for the answer
        written.set_exception(error)


WRITER_THREAD = WriterThread()

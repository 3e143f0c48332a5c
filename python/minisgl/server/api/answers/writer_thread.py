"""Thread that writes the answers that would hold the event loop up.

It is the only thread that encodes log-probabilities, because each would compete with the loop for the GIL. (Others only
join what is encoded.) The largest answer takes 20 s. So between two of its pieces the thread writes the smaller answers
that have come meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Semaphore, Thread, current_thread


class WriterThread(Thread):
    """Writes answers in order of arrival; small ones interrupt a large one. It starts with the first."""

    def __init__(self) -> None:
        super().__init__(name="answer-writer", daemon=True)
        self._small: deque[Callable[[], None]] = deque()
        self._large: deque[Callable[[], None]] = deque()
        self._arrived = Semaphore(0)  # counts at least the answers that wait
        self._is_interruptible = False  # a large answer is being written

    async def write(self, write: Callable[[], bytes], *, is_large: bool) -> bytes:
        """Return what `write` returns, called in the thread. Only one event loop may use the thread."""
        written: Future[bytes] = Future()
        (self._large if is_large else self._small).append(partial(_run, write, written))
        self._arrived.release()
        if not self.ident:
            self.start()
        return await asyncio.wrap_future(written)

    def run(self) -> None:
        while True:
            self._arrived.acquire()
            self._write_small()
            if self._large:
                self._is_interruptible = True
                self._large.popleft()()
                self._is_interruptible = False

    def write_waiting(self) -> None:
        """Write the small answers that wait, if this is called by a large one between two of its pieces."""
        if self._is_interruptible:
            self._is_interruptible = False  # small ones have pieces, too
            self._write_small()
            self._is_interruptible = True

    def _write_small(self) -> None:
        while self._small:
            self._small.popleft()()


def let_others_pass() -> None:
    """Write the small answers that wait, if a writer thread calls this between two pieces of a large one."""
    if isinstance(thread := current_thread(), WriterThread):
        thread.write_waiting()


def _run(write: Callable[[], bytes], written: Future[bytes]) -> None:
    if not written.set_running_or_notify_cancel():
        return
    try:
        written.set_result(write())
    except Exception as error:  # belongs to the one who waits for the answer
        written.set_exception(error)

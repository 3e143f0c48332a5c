"""Delays Ctrl-C until a call of `LLM` can be given up: between two steps, or while the host waits for one.

An exception at any other line could leave the scheduler half changed, and the LLM would have to be made anew.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import currentframe
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class Interrupts:
    """Handler of SIGINT during a call. A second signal while one is delayed is not delayed: a step may hang."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] = signal.default_int_handler  # the program's own
        self._is_due = False  # a signal has come that the handler has not seen
        self._is_waiting = False

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Delay signals during a call. Outside of the main thread no signal is handled, so nothing is to be done."""
        self._is_due = self._is_waiting = False  # a second signal may have interrupted the end of an earlier call
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        self._handler = handler
        try:
            signal.signal(signal.SIGINT, self._receive)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, handler)
                self.check()
        finally:  # a second signal may have raised before the inner one
            signal.signal(signal.SIGINT, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_due or self._is_waiting:
            self._is_due = False
            self._handler(number, frame)
        else:
            self._is_due = True

    def check(self) -> None:
        """Give a delayed signal to the program's handler, which usually raises KeyboardInterrupt."""
        if self._is_due:
            self._is_due = False
            self._handler(signal.SIGINT, currentframe())

    def wait(self, pending: Callable[[], T]) -> T:
        """Return the result of a step, for which a signal does not wait."""
        self._is_waiting = True
        try:
            self.check()
            return pending()
        finally:
            self._is_waiting = False

"""SIGINT, SIGTERM and SIGHUP as bytes on a socket."""

from __future__ import annotations

import signal
import socket


class SignalSocket:
    """What a selector waits for beside its other sources: it can be read when the user wants the process to end.

    A handler that raises would lose its word where the interrupted code catches exceptions, as logging does; and
    Python runs no handler of a signal that came just before a wait until that wait is over. Made in the main thread.
    """

    def __init__(self) -> None:
        self._ours, self._python = socket.socketpair()
        for end in (self._ours, self._python):
            end.setblocking(False)
        signal.set_wakeup_fd(self._python.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started by nohup
            # A function, because processes that we start would inherit that a signal is ignored.
            signal.signal(number, lambda _number, _frame: None)

    def fileno(self) -> int:
        return self._ours.fileno()

    def receive(self) -> set[int]:
        """The numbers of the signals that came since the last call."""
        try:
            return set(self._ours.recv(4096))
        except BlockingIOError:
            return set()

    def close(self) -> None:
        """The signals that still come are passed over."""
        signal.set_wakeup_fd(-1)
        self._ours.close()
        self._python.close()

"""Signals that a selector waits for, beside its other sources."""

from __future__ import annotations

import signal
import socket


class SignalSocket:
    """SIGINT, SIGTERM and SIGHUP as bytes on a socket, for a selector that waits for other sources too.

    A handler that raises is not enough: the interrupted code may catch the exception, as logging does, and Python runs
    the handler of a signal that arrives just before a wait only after that wait. Must be created in the main thread.
    """

    def __init__(self) -> None:
        self._ours, self._python = socket.socketpair()
        for end in (self._ours, self._python):
            end.setblocking(False)
        signal.set_wakeup_fd(self._python.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started by nohup
            # Not SIG_IGN, which child processes would inherit.
            signal.signal(number, lambda _number, _frame: None)

    def fileno(self) -> int:
        return self._ours.fileno()

    def receive(self) -> set[int]:
        """Return the numbers of the signals that came since the last call."""
        try:
            return set(self._ours.recv(4096))
        except BlockingIOError:
            return set()

    def close(self) -> None:
        """Ignore these signals from now on."""
        signal.set_wakeup_fd(-1)
        self._ours.close()
        self._python.close()

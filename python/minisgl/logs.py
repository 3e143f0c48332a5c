"""Logs of every process: to stderr, a line an event."""

from __future__ import annotations

import logging
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.config import LogLevel


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr while whoever reads that keeps up, and drops what it would have to wait for.

    A pipe that nobody empties, or a terminal that is halted, would otherwise stop the process with its next line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_writable():
            self._dropped += 1
            return
        if self._dropped:
            self.stream.write(f"({self._dropped} lines were dropped while nobody read them)\n")
            self._dropped = 0
        super().emit(record)

    def _is_writable(self) -> bool:
        """True if a line of less than a page can be written at once, as far as the system can tell."""
        try:
            poll = select.poll()
            poll.register(self.stream, select.POLLOUT)
        except (AttributeError, TypeError, OSError, ValueError):  # no such call, or no file behind the stream
            return True
        return bool(poll.poll(0))


def set_up_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[StderrHandler()]
    )
    for chatty in ("httpx", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_log_level(level: LogLevel) -> None:
    """Log what is at least this important."""
    logging.getLogger().setLevel(level.upper())

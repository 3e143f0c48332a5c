"""Logs of every process: to stderr, a line an event, as text or as a JSON object."""

from __future__ import annotations

import logging
import os
import select
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from minisgl.config.server import LogFormat, LogLevel


REST_TIMEOUT = 0.1  # seconds


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr while its reader keeps up, and drops what it would have to wait for.

    An unread pipe or a halted terminal would otherwise block the process at its next line. Only the rest of a long text
    that has begun waits, for REST_TIMEOUT.
    """

    def __init__(self) -> None:
        super().__init__()
        self._never_waits = _open_again(self.stream)
        self._dropped = 0
        self._ends_line = True  # False after a line of which only the beginning was written

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + self.terminator
            if self._dropped:
                note = f"({self._dropped} lines were dropped because stderr was not read)"
                about = logging.LogRecord(__name__, logging.WARNING, __file__, 0, note, None, None)
                text = self.format(about) + self.terminator + text
            if not self._ends_line:
                text = self.terminator + text
            self._write(text)
        except Exception:
            self.handleError(record)

    def _write(self, text: str) -> None:
        """Write the text, or as much of it as the reader keeps up with."""
        if self._never_waits is None:
            if not _is_writable(self.stream, 0.0):
                self._dropped += 1
                return
            self.stream.write(text)
            self.flush()
        else:
            data = text.encode(errors="backslashreplace")
            written = _write_at_once(self._never_waits, data)
            if not written:
                self._dropped += 1
                return
            self._ends_line = written == len(data)
        self._dropped = 0 if self._ends_line else 1


def _open_again(stream: TextIO) -> int | None:
    """Return a descriptor for writes that never wait, if the stream is a pipe or a terminal that can be opened again.

    Polling is not enough: a line of more than a page waits if the pipe has less room, and so does the second of two
    processes that have found room for one line. The stream's own descriptor is shared with other programs, which may
    rely on waiting.
    """
    try:
        mode = os.fstat(stream.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except (AttributeError, OSError, ValueError):  # a stream without a file, or a file that may not be opened again
        pass
    return None


def _write_at_once(descriptor: int, data: bytes) -> int:
    """Write the data, or as much of it as its reader takes in time; return the number of bytes.

    A terminal has room for 19 KB. The end of a traceback says most, so the rest of what has begun waits for the reader,
    but not for long: it may have stopped.
    """
    written, deadline = 0, time.monotonic() + REST_TIMEOUT
    while True:
        with suppress(BlockingIOError):
            written += os.write(descriptor, data[written:])
        if written in (0, len(data)) or not _is_writable(descriptor, max(0.0, deadline - time.monotonic())):
            return written


def _is_writable(stream: TextIO | int, timeout: float) -> bool:
    """Return True if a line of less than a page can be written at once, as far as the system can tell.

    It waits for `timeout` seconds until it can be.
    """
    try:
        poll = select.poll()
        poll.register(stream, select.POLLOUT)
    except (AttributeError, TypeError, OSError, ValueError):  # no such call, or a stream without a file
        return True
    return bool(poll.poll(timeout * 1e3))


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON: time (UTC), level, process, logger, message.

    A record that was logged with `extra={"request_id": ...}` has that too, and an exception its traceback.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def logs_json() -> bool:
    """Return True if log lines are JSON objects."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def set_up_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[StderrHandler()]
    )
    for chatty in ("httpx", "httpx2"):  # they log each address, with its signature
        logging.getLogger(chatty).setLevel(logging.WARNING)


def configure_logging(level: LogLevel, form: LogFormat = "text", process: str = "main") -> None:
    """Log what is at least this important, in this form; `process` is the name of this one in JSON."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    if form == "json":
        for handler in root.handlers:
            handler.setFormatter(JsonFormatter(process))
        logging.captureWarnings(True)

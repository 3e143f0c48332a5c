"""Logs of every process: to stderr, a line an event, as text or as a JSON object."""

from __future__ import annotations

import logging
import select
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from minisgl.config.server import LogFormat, LogLevel


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr while its reader keeps up, and drops lines that it would have to wait for.

    An unread pipe or a halted terminal would otherwise block the process at its next line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_writable():
            self._dropped += 1
            return
        if self._dropped:
            text = f"({self._dropped} lines were dropped because stderr was not read)"
            self._dropped = 0
            super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
        super().emit(record)

    def _is_writable(self) -> bool:
        """True if a line of less than a page can be written at once, as far as the system can tell."""
        try:
            poll = select.poll()
            poll.register(self.stream, select.POLLOUT)
        except (AttributeError, TypeError, OSError, ValueError):  # no such call, or a stream without a file
            return True
        return bool(poll.poll(0))


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
    for chatty in ("httpx", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def configure_logging(level: LogLevel, form: LogFormat = "text", process: str = "main") -> None:
    """Log what is at least this important, in this form; `process` is the name of this one in JSON."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    if form == "json":
        for handler in root.handlers:
            handler.setFormatter(JsonFormatter(process))
        logging.captureWarnings(True)

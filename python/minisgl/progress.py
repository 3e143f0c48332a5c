"""Progress of long work: a bar on a terminal, and a plain line every few seconds in a log."""

from __future__ import annotations

import io
import logging
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from tqdm.auto import tqdm

from minisgl.logs import logs_json

logger = logging.getLogger(__name__)

LINE_SECONDS = 5.0  # before the first line, and between two lines


class LineBar(tqdm):  # type: ignore[misc]
    """A bar for a stderr that is no terminal: it writes lines, without colours or carriage returns."""

    monitor_interval = 0  # no thread: a line comes with an update

    def __init__(self, *args: Any, leave: bool = True, **options: Any) -> None:
        self._says_end = leave
        self._last_line, self._last_n = time.monotonic(), 0
        options |= {"mininterval": LINE_SECONDS, "delay": LINE_SECONDS, "miniters": 1}
        # Text that tqdm writes outside `display` is dropped.
        super().__init__(*args, **(options | {"file": io.StringIO(), "leave": False}))

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG002
        """Write how far it has come, if the last line is old enough: a new description asks for one, too."""
        if msg is None and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._write_line()
        return True

    def close(self) -> None:
        if self._says_end and not self.disable and self.n != self._last_n:
            self._write_line()
        super().close()

    def __del__(self) -> None:
        """Write no last line: the garbage collector ends bars that their library left open, maybe hours later."""
        self._says_end = False
        super().__del__()

    def _write_line(self) -> None:
        self._last_line, self._last_n = time.monotonic(), self.n
        size = self.format_sizeof if self.unit_scale else str
        done = size(self.n)
        if self.total:
            done += f" of {size(self.total)} ({100 * self.n / self.total:.0f}%)"
        line = f"{self.desc.removesuffix(': ')}: {done}"
        if logs_json():
            logger.info("%s", line)
        else:
            with suppress(OSError):  # a log that cannot be written, on a full disk, must not end the work
                print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def line_bar() -> type[LineBar] | None:
    """Return the class of bars for libraries that make their own; None on a terminal, where theirs are right."""
    return None if sys.stderr.isatty() and not logs_json() else LineBar


def progress_bar(text: str, total: int, *, unit: str = "", leave: bool = False, shown: bool = True) -> tqdm[NoReturn]:
    """Return a bar of `total` units; bytes are shown as such if the unit is "B"."""
    kind = line_bar() or tqdm
    bar: tqdm[NoReturn] = kind(
        desc=text, total=total, unit=unit, unit_scale=unit == "B", leave=leave, disable=not shown
    )
    return bar

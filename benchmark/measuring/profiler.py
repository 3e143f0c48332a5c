"""A sampling profiler inside a process: where its main thread is at every millisecond of CPU time it uses.

SIGUSR1 starts it, and the next SIGUSR1 ends it and writes what it has seen as JSON: [[samples, [[function, file,
line], ... outwards]], ...]. Time inside C code counts for the Python function that called it. Time of C code that
nobody in Python called, as that of an event loop, counts for the first function that it enters afterwards.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

INTERVAL_SECONDS = 0.001
DEPTH = 40  # frames of a stack that are kept
MOST_FUNCTIONS = 12  # that are read from a profile


class Profiler:
    """Installs its signal handlers at once; SIGPROF and SIGUSR1 are its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stacks: Counter[tuple[tuple[CodeType, int], ...]] = Counter()
        self._running = False
        signal.signal(signal.SIGUSR1, self._toggle)
        signal.signal(signal.SIGPROF, self._sample)

    def _toggle(self, _signum: int, _frame: FrameType | None) -> None:
        self._running = not self._running
        interval = INTERVAL_SECONDS if self._running else 0.0
        signal.setitimer(signal.ITIMER_PROF, interval, interval)
        if not self._running:
            self._write()

    def _sample(self, _signum: int, frame: FrameType | None) -> None:
        stack: list[tuple[CodeType, int]] = []
        while frame is not None and len(stack) < DEPTH:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self._stacks[tuple(stack)] += 1

    def _write(self) -> None:
        rows = [[count, [_describe(code, line) for code, line in stack]] for stack, count in self._stacks.items()]
        self._stacks.clear()
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(rows))
        partial.rename(self._path)  # whoever finds it finds all of it


def _describe(code: CodeType, line: int) -> list[str | int]:
    return [code.co_qualname, _short(code.co_filename), line]


def _short(filename: str) -> str:
    """Return the part of a file's path that says what it is."""
    parts = Path(filename).parts
    for folder in ("site-packages", "python"):
        if folder in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    return "/".join(parts[-2:])


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """A function and its share of a process's samples."""

    where: str
    own: float  # in the function itself
    total: float  # in it or what it called


def read_profile(path: Path) -> list[ProfileEntry]:
    """Return the functions with the most time of their own."""
    rows = json.loads(path.read_text())
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for count, stack in rows:
        names = [f"{file}:{function}" for function, file, _ in stack]
        if names:
            own[names[0]] += count
        for name in set(names):
            total[name] += count
    samples = max(1, sum(own.values()))
    longest = own.most_common(MOST_FUNCTIONS)
    return [ProfileEntry(name, count / samples, total[name] / samples) for name, count in longest]

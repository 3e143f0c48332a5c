"""Judgement of ranks that live and do not go on: a stopped process, a collective that never ends.

Ranks are pinged. A rank hangs if for so many seconds it does not answer, or has not begun a step that rank 0 has. All
together hang if rank 0 waits for a step and none computes: on a CPU a step may last for minutes, but then processes
use the CPU; on a GPU, whose steps last a second or two, only the end of a step counts. An idle rank cannot be late.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minisgl.message.control import Ping, Progress
from minisgl.process.child import Child

PING_SECONDS = 0.5  # between two looks
COMPUTES = 0.1  # cores that ranks use together, at least, while a step makes progress on a CPU
LATE = 2.0  # seconds without an answer that single a rank out where all hang


@dataclass(slots=True)
class _Rank:
    progress: Progress = field(default_factory=Progress)
    answered: bool = True
    silent: float = 0.0  # seconds since it was pinged and did not answer
    behind: float = 0.0  # seconds since it has begun nothing of what rank 0 has


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank that hangs, and a text that says how it shows."""

    rank: int
    text: str


class HangWatch:
    """Watch over `num_ranks` ranks. Pure: it sees answers and the time between looks."""

    def __init__(self, num_ranks: int, limit: float) -> None:
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._limit = limit
        self._finished = 0  # steps that rank 0 has finished
        self._cpu_seconds = 0.0  # of all ranks together
        self._stuck = 0.0  # seconds without progress

    def answer(self, rank: int, progress: Progress) -> None:
        """Take a rank's answer to a ping."""
        one = self._ranks[rank]
        if progress.begun > one.progress.begun:
            one.behind = 0.0
        one.progress, one.answered, one.silent = progress, True, 0.0

    def look(self, elapsed: float) -> tuple[Sequence[int], Hang | None]:
        """Return the ranks to ping, and the rank that hangs, if one does.

        `elapsed`: seconds since the last look. More than the usual ones have passed for the ranks as well only if
        nobody stopped the watch, or the machine, in between: they do not count.
        """
        elapsed = min(elapsed, 2 * PING_SECONDS)
        first = self._ranks[0].progress
        for one in self._ranks:
            if not one.answered:
                one.silent += elapsed
            elif one.progress.begun < first.begun:
                one.behind += elapsed
            else:
                one.behind = 0.0
        cpu_seconds = sum(one.progress.cpu_seconds for one in self._ranks)
        computes = cpu_seconds - self._cpu_seconds >= COMPUTES * elapsed
        progresses = first.begun == first.finished or first.finished > self._finished or computes
        self._stuck = 0.0 if progresses else self._stuck + elapsed
        self._finished, self._cpu_seconds = first.finished, cpu_seconds
        to_ping = [rank for rank, one in enumerate(self._ranks) if one.answered]
        for rank in to_ping:
            self._ranks[rank].answered = False
        return to_ping, self._judge()

    def _judge(self) -> Hang | None:
        first = self._ranks[0].progress
        all_hang = self._stuck > self._limit
        silent = max(range(len(self._ranks)), key=lambda rank: self._ranks[rank].silent)
        if (seconds := self._ranks[silent].silent) > (LATE if all_hang else self._limit):
            return Hang(silent, f"it has not answered for {seconds:.0f} s")
        behind = max(range(len(self._ranks)), key=lambda rank: self._ranks[rank].behind)
        if (seconds := self._ranks[behind].behind) > (LATE if all_hang else self._limit):
            return Hang(behind, f"it has not begun step {first.begun - 1} for {seconds:.0f} s")
        if all_hang:
            return Hang(0, f"step {first.finished} has not ended for {self._stuck:.0f} s, and no rank computes")
        return None


class RankWatch:
    """Pings the processes of ranks, and tells a HangWatch what they answer. A `limit` of 0 seconds means no watch.

    `children`: by rank. A rank that lives in this process answers by itself.
    """

    def __init__(self, children: Mapping[int, Child], num_ranks: int, limit: float) -> None:
        self._children = children
        self._ranks = {child.name: rank for rank, child in children.items()}
        self._watch = HangWatch(num_ranks, limit)
        self._limit = limit
        self._looked = time.monotonic()

    def answer(self, name: str, progress: Progress) -> None:
        """Take what the process of that name answered."""
        self._watch.answer(self._ranks[name], progress)

    def answer_here(self, progress: Progress) -> None:
        """Take the progress of rank 0, in this process."""
        self._watch.answer(0, progress)

    @property
    def pause(self) -> float | None:
        """Seconds to the next look; None: there is none."""
        return max(self._looked + PING_SECONDS - time.monotonic(), 0.0) if self._limit else None

    def look(self) -> str | None:
        """Ping whoever has answered, if it is time for it; return a line that names the rank that hangs, if one does.

        Answers that have come are taken before.
        """
        if self.pause != 0.0:
            return None
        now = time.monotonic()
        to_ping, hang = self._watch.look(now - self._looked)
        self._looked = now
        for rank in to_ping:
            if rank in self._children:
                self._children[rank].pipe.send(Ping())
        return None if hang is None else f"scheduler-{hang.rank} hangs: {hang.text}"

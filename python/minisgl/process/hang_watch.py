"""Finds tensor-parallel ranks that hang: a stopped process, or a collective that never ends.

Ranks are pinged. A rank hangs if, for `hang_timeout` seconds, it does not answer, or does not begin a step that rank 0
has begun. The group hangs if rank 0 waits for a step and no rank computes: on a CPU, where a step may take minutes, the
processes must use CPU time; on a GPU, where a step takes a second or two, a step must end. An idle rank does not hang.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minisgl.message.control import Ping, Progress
from minisgl.process.child import Child

PING_SECONDS = 0.5  # between two looks
COMPUTES = 0.1  # cores that all ranks together use at least while a step makes progress on a CPU
LATE = 2.0  # seconds of silence or delay after which a rank is named as the cause if the group hangs


@dataclass(slots=True)
class _Rank:
    progress: Progress = field(default_factory=Progress)
    answered: bool = True
    silent: float = 0.0  # seconds since a ping that it has not answered
    behind: float = 0.0  # seconds for which it has not begun a step that rank 0 has begun


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank that hangs, and the symptom in words."""

    rank: int
    text: str


class HangWatch:
    """Decides which of `num_ranks` ranks hangs, from their answers and the time between looks. No I/O."""

    def __init__(self, num_ranks: int, limit: float) -> None:
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._limit = limit
        self._finished = 0  # steps that rank 0 has finished
        self._cpu_seconds = 0.0  # of all ranks together
        self._stuck = 0.0  # seconds without progress

    def answer(self, rank: int, progress: Progress) -> None:
        """Record a rank's answer to a ping."""
        one = self._ranks[rank]
        if progress.begun > one.progress.begun:
            one.behind = 0.0
        one.progress, one.answered, one.silent = progress, True, 0.0

    def look(self, elapsed: float) -> tuple[Sequence[int], Hang | None]:
        """Return the ranks to ping, and the rank that hangs, if one does.

        `elapsed`: seconds since the last look. It is capped, because after a long pause this process or the machine may
        have been stopped, and not the ranks.
        """
        elapsed = min(elapsed, 2 * PING_SECONDS)
        first = self._ranks[0].progress
        for one in self._ranks:
            if not one.answered:
                one.silent += elapsed
            elif one.progress.begun < first.begun:
                one.behind += elapsed
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
        limit = LATE if all_hang else self._limit
        silent = max(range(len(self._ranks)), key=lambda rank: self._ranks[rank].silent)
        if (seconds := self._ranks[silent].silent) > limit:
            return Hang(silent, f"it has not answered for {seconds:.0f} s")
        behind = max(range(len(self._ranks)), key=lambda rank: self._ranks[rank].behind)
        if (seconds := self._ranks[behind].behind) > limit:
            return Hang(behind, f"it has not begun step {first.begun - 1} for {seconds:.0f} s")
        if all_hang:
            return Hang(0, f"step {first.finished} has not ended for {self._stuck:.0f} s, and no rank computes")
        return None


class RankWatch:
    """Pings the processes of ranks, and passes their answers to a HangWatch. `limit` 0: no watch.

    `children`: processes by rank. Rank 0 may be in this process; then `answer_here` takes its progress.
    """

    def __init__(self, children: Mapping[int, Child], num_ranks: int, limit: float) -> None:
        self._children = children
        self._ranks = {child.name: rank for rank, child in children.items()}
        self._watch = HangWatch(num_ranks, limit)
        self._limit = limit
        self._looked = time.monotonic()

    def answer(self, name: str, progress: Progress) -> None:
        """Record the answer of the process with this name."""
        self._watch.answer(self._ranks[name], progress)

    def answer_here(self, progress: Progress) -> None:
        """Record the progress of rank 0, which is in this process."""
        self._watch.answer(0, progress)

    @property
    def pause(self) -> float | None:
        """Seconds until the next look; None if there is no watch."""
        return max(self._looked + PING_SECONDS - time.monotonic(), 0.0) if self._limit else None

    def look(self) -> str | None:
        """Ping the ranks that have answered, if it is time; return a line that names the rank that hangs, if one does.

        Answers that have arrived must be recorded before.
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

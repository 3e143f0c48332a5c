"""Threads of steps on the CPU: all of them, or one while other processes want the cores.

A parallel step is as slow as the last of its threads, and at each of its many barriers the others spin. Where other
processes have the cores, that multiplies a step's time; a step on one thread has no barriers. The operating system
tells how long each thread was ready to run and had no core (`/proc/self/task/*/schedstat`), and the one that waited
longest says how crowded the cores are: the others sleep at barriers, which does not look like waiting. Where the
system does not tell, steps use all threads.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch

WINDOW = 0.2  # seconds of steps that one decision looks at
CROWDED = 0.25  # share of the time spent waiting for a core from which steps use one thread
PATIENCE = 0.4  # seconds of such steps in a row: a compiler or a schema of our own takes a core for less
CALM = 0.1  # share below which the cores count as free
FIRST_BACKOFF = 2.0  # seconds of steps on one thread with free cores before all threads are tried again
LONGEST_BACKOFF = 64.0


class ThreadPolicy:
    """Decide whether steps use one thread. Pure: it sees only the times that it is told.

    Where one thread finds free cores and all threads do not, each return lasts for a window, and the time to the next
    is twice as long: 2 s, 4 s, ... 64 s of steps.
    """

    def __init__(self) -> None:
        self.single = False
        self._backoff = FIRST_BACKOFF
        self._crowded = 0.0  # seconds of steps in a row that waited
        self._calm = math.inf  # seconds of steps: since the last return to all threads, or with free cores on one

    def record(self, wall: float, waited: float) -> None:
        """Take a window's seconds of steps, and for how many of them some thread waited for a core."""
        share = waited / wall
        if self.single:
            self._calm = self._calm + wall if share < CALM else 0.0
            if self._calm >= self._backoff:
                self.single, self._calm = False, 0.0
            return
        if share <= CROWDED:
            self._crowded = 0.0
            self._calm += wall
            return
        self._crowded += wall
        flaps = self._calm < self._backoff
        if flaps or self._crowded >= PATIENCE:
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF) if flaps else FIRST_BACKOFF
            self.single, self._crowded, self._calm = True, 0.0, 0.0


def name_thread() -> None:
    """Give this thread a name of its own, which OpenMP's threads inherit from the one that starts them."""
    with suppress(OSError), open("/proc/thread-self/comm", "w") as file:
        file.write("cpu-device")


def waited_ns() -> dict[int, int]:
    """Return how long each thread with this one's name was ready and had no core, in ns by thread id.

    Others do not count: two threads that compute grammars' masks wait for cores too, because steps have them.
    Empty where the system does not tell: no Linux, or a sandbox that imitates it.
    """
    found: dict[int, int] = {}
    try:
        own = _read("/proc/thread-self/comm")
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):  # the thread may have ended meanwhile
            if _read(f"/proc/self/task/{thread}/comm") == own:
                found[int(thread)] = int(_read(f"/proc/self/task/{thread}/schedstat").split()[1])
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


class StepThreads:
    """Context around whatever a CPU device's thread runs: limits torch's threads meanwhile, and watches the time.

    Torch's number of threads is as before in between, for the process may be a user's. Entering and leaving take 2 us,
    and a look at all threads, once in a window, 30 us for each.
    """

    def __init__(self, read_waited: Callable[[], dict[int, int]] = waited_ns) -> None:
        self.policy = ThreadPolicy()
        self._read_waited = read_waited
        self._before: dict[int, int] = {}  # waited_ns at the begin of the window
        self._wall = 0.0  # seconds of steps in the window
        self._begin = 0.0
        self._end = -math.inf
        self._threads = 1  # to put back

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        if self._threads == 1:
            return
        self._begin = time.perf_counter()
        if self._begin - self._end > WINDOW:  # idle until now: what other threads did then does not count
            self._wall, self._before = 0.0, self._read_waited()
        if self.policy.single:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if self._threads == 1:
            return
        if self.policy.single:
            torch.set_num_threads(self._threads)
        self._end = time.perf_counter()
        self._wall += self._end - self._begin
        if self._wall < WINDOW:
            return
        now = self._read_waited()
        waited = max((now[thread] - self._before[thread] for thread in now.keys() & self._before), default=0)
        self.policy.record(self._wall, waited / 1e9)
        self._wall, self._before = 0.0, now

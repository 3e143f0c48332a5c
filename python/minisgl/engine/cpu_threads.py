"""Number of threads of steps on the CPU: all, or one while other processes need the cores.

A parallel step is as slow as its slowest thread, for which the others spin at each of its many barriers. If other
processes have the cores, that multiplies a step's time; a step on one thread has no barriers. The operating system
reports how long each thread was ready to run and had no core (`/proc/self/task/*/schedstat`). The longest of these
waits says how crowded the cores are, because the other threads sleep at barriers, which does not count as waiting. If
the system does not report it, steps use all threads.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch

WINDOW = 0.2  # seconds of steps on which one decision is based
CROWDED = 0.25  # share of waiting for a core above which steps use one thread
PATIENCE = 0.4  # seconds of crowded steps in a row before that: compilations of our own take a core for less
CALM = 0.1  # share of waiting below which the cores count as free
FIRST_BACKOFF = 2.0  # seconds of steps on one thread with free cores before all threads are tried again
LONGEST_BACKOFF = 64.0


class ThreadPolicy:
    """Decides whether steps use one thread, from the times that it is given.

    If the cores are free for one thread but crowded for all, each return to all threads lasts for one window, and the
    time to the next return doubles: 2 s, 4 s, ... 64 s of steps.
    """

    def __init__(self) -> None:
        self.single = False
        self._backoff = FIRST_BACKOFF
        self._crowded = 0.0  # seconds of crowded steps in a row
        # Seconds of steps with free cores on one thread; on all threads, since the last return to these.
        self._calm = math.inf

    def record(self, wall: float, waited: float) -> None:
        """Evaluate a window of `wall` seconds of steps, in which one thread waited `waited` seconds for a core."""
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
    """Name this thread; the threads that OpenMP starts from it inherit the name."""
    with suppress(OSError), open("/proc/thread-self/comm", "w") as file:
        file.write("cpu-device")


def waited_ns() -> dict[int, int]:
    """Return how long each thread with this one's name was ready and had no core, in ns by thread id.

    Other threads do not count: those that compute grammar bitmasks wait for cores because of the steps themselves. The
    result is empty if the system does not report it: not Linux, or a sandbox that imitates it.
    """
    found: dict[int, int] = {}
    try:
        own = _read("/proc/thread-self/comm")
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):  # the thread may have ended
            if _read(f"/proc/self/task/{thread}/comm") == own:
                found[int(thread)] = int(_read(f"/proc/self/task/{thread}/schedstat").split()[1])
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


class StepThreads:
    """Context around each step that a CPU device's thread runs: limits torch's threads, and measures the waits.

    Between steps torch's number of threads is restored, because the process may be a user's. Entering and leaving take
    2 us; reading the waits, once in a window, takes 30 us for each thread.
    """

    def __init__(self, read_waited: Callable[[], dict[int, int]] = waited_ns) -> None:
        self.policy = ThreadPolicy()
        self._read_waited = read_waited
        self._before: dict[int, int] = {}  # `waited_ns` at the beginning of the window
        self._wall = 0.0  # seconds of steps in the window
        self._begin = 0.0
        self._end = -math.inf
        self._threads = 1  # torch's number of threads, to restore

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        if self._threads == 1:
            return
        self._begin = time.perf_counter()
        if self._begin - self._end > WINDOW:  # idle until now: waits of that time do not count
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

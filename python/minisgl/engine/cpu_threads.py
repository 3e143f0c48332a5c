"""Idle OpenMP threads of an engine on a CPU: they are to sleep soon, also where torch was imported before Minisgl.

libgomp reads GOMP_SPINCOUNT when it is loaded, so a worker process gets it in its environment
(`process.cpu_environment`). In a process that has torch already there is one way left: a libgomp that manages more
threads than there are CPUs spins a hundred loops only. So a team of one thread more than that is made, which sleeps
until the engine is closed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping

from minisgl.process.cpu_environment import PRIMITIVE_CACHES, chooses_waiting


class CpuThreads:
    """Bounds of this process's CPU libraries while an engine is open. A user's own choices in `environ` stay.

    oneDNN's take effect if it has not been used before.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._closed = threading.Event()
        for name, value in PRIMITIVE_CACHES.items():
            if name not in environ:
                os.environ[name] = value
        if not chooses_waiting(environ):
            self._park_team()

    def _park_team(self) -> None:
        path = _libgomp()
        if path is None:
            return  # another OpenMP, which has its own defaults
        library = ctypes.CDLL(path)
        parked = threading.Event()

        def park() -> None:
            # What the threads run must be no Python function: any that takes nothing will do.
            library.GOMP_parallel(library.omp_get_thread_num, None, len(os.sched_getaffinity(0)) + 1, 0)
            parked.set()
            self._closed.wait()

        threading.Thread(target=park, name="parked-openmp-team", daemon=True).start()
        parked.wait()

    def close(self) -> None:
        """Let the team end."""
        self._closed.set()


def _libgomp() -> str | None:
    """Return the path of the libgomp in this process, which is torch's own."""
    with open("/proc/self/maps") as maps:
        return next((line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line), None)

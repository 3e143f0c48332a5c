"""Resources of the machine that the server's processes use: open files, memory and CPU time."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Mapping

from minisgl.config import ConfigError

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_535  # as in vLLM and SGLang
FILES_BESIDE_CONNECTIONS = 128  # libraries, sockets to other processes and status requests of the API server
# Iterations that an OpenMP thread spins before it sleeps. libgomp's default, 300,000, takes some 10 ms of a core that
# others may need; fewer than 50,000 slow down steps on a quiet machine. On a busy one `engine.cpu_threads` uses one
# thread.
SPIN_COUNT = 50_000
# Compiled products that oneDNN caches, one for each matrix and number of tokens: some 0.5 MB each. Its default is 1024.
CACHED_PRIMITIVES = 64

PRIMITIVE_CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CACHED_PRIMITIVES),
    "LRU_CACHE_CAPACITY": str(CACHED_PRIMITIVES),  # of torch's own cache of the same primitives
}
MALLOC = {
    "MALLOC_ARENA_MAX": "1",  # memory that one thread frees can be used by another
    # Freed tensors above this size go back to the system at once. glibc raises the threshold to 32 MB by itself, after
    # which long-lived memory between large tensors fragments the heap. Below 4 MB prefills lose over 10% to page
    # faults.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),  # free memory that stays at the end of the heap
}


def open_standard_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed, as some programs start others.

    Otherwise the first sockets would get their numbers, and workers, which get a stdin of their own, would lose them.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(fd, True)
    os.close(fd)


def wait_for_children() -> None:
    """Let this process and its children learn how their children end.

    Some programs ignore SIGCHLD, which the programs that they start inherit: then nobody can wait for a process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def raise_open_files(max_queued_requests: int) -> int:
    """Raise the soft limit of open files as far as useful and allowed; return it.

    Processes started afterwards inherit it. ConfigError if the server could not even start, and a warning in the log if
    the limit is too low for this many clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    if limit < FILES_BESIDE_CONNECTIONS:
        raise ConfigError(
            f"a process may open only {limit} files (RLIMIT_NOFILE), and the server's processes need "
            f"{FILES_BESIDE_CONNECTIONS} and one for each connection: raise the hard limit (ulimit -Hn, systemd's "
            "LimitNOFILE=, docker run --ulimit nofile=65535)"
        )
    if limit < max_queued_requests + FILES_BESIDE_CONNECTIONS:
        logger.warning(
            "a process may open %d files, too few for the connections of --max-queued-requests %d: later clients will "
            "wait. Raise the hard limit (ulimit -Hn) to %d, or lower the flag",
            limit,
            max_queued_requests,
            max_queued_requests + FILES_BESIDE_CONNECTIONS,
        )
    return limit


def cpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment of a scheduler; variables that the user has set are kept."""
    wanted = {**PRIMITIVE_CACHES, **MALLOC, "GOMP_SPINCOUNT": str(SPIN_COUNT)}
    if "OMP_WAIT_POLICY" in environ:
        del wanted["GOMP_SPINCOUNT"]
    return {name: value for name, value in wanted.items() if name not in environ}

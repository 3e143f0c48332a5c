"""Resources that the server's processes take of their machine: files, a folder for sockets, memory and CPU time."""

from __future__ import annotations

import logging
import os
import resource
import tempfile
from collections.abc import Mapping

from minisgl.config import ConfigError

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_535  # the value of vLLM and SGLang
FILES_BESIDE_CONNECTIONS = 128  # libraries, sockets to other processes and status requests of the API server
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path on Linux
LONGEST_NAME = len("/tokenizer-999.ipc")  # longest name in message.socket.Addresses
# Loops of an OpenMP thread before it sleeps. libgomp's own 300,000 are some 10 ms, taken from whoever has work; fewer
# than 50,000 slow down steps on a quiet machine. Where the cores are wanted, `engine.cpu_threads` uses one thread.
SPIN_COUNT = 50_000
# Products that oneDNN keeps compiled, one a matrix and number of tokens: some 0.5 MB each. Its own bound is 1024.
CACHED_PRIMITIVES = 64

PRIMITIVE_CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CACHED_PRIMITIVES),
    "LRU_CACHE_CAPACITY": str(CACHED_PRIMITIVES),  # torch's own, in front of it
}
MALLOC = {
    "MALLOC_ARENA_MAX": "1",  # memory that one thread frees is there for the next
    # Larger tensors go back to the system at once. By itself glibc raises this to 32 MB, and what lives longer between
    # such tensors then leaves holes in the heap. Less than 4 MB costs prefills over 10% in page faults.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),  # free memory that stays at the end of the heap
}


def raise_open_files(max_queued_requests: int) -> int:
    """Raise the soft limit as far as it is useful and allowed; return it.

    Processes started afterwards inherit it. Logs a warning if the limit is too low for that many clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    if limit < max_queued_requests + FILES_BESIDE_CONNECTIONS:
        logger.warning(
            "a process may open %d files, too few for the connections of --max-queued-requests %d: later clients will "
            "wait. Raise the hard limit (ulimit -Hn) to %d, or lower the flag",
            limit,
            max_queued_requests,
            max_queued_requests + FILES_BESIDE_CONNECTIONS,
        )
    return limit


def make_run_dir() -> str:
    """Make a folder for sockets below TMPDIR, of mode 0700. ConfigError if its path is too long for a socket's."""
    folder = tempfile.mkdtemp(prefix="minisgl-")
    size = len(os.fsencode(folder))
    if size + LONGEST_NAME <= MAX_SOCKET_PATH and _is_text(folder):
        return folder
    os.rmdir(folder)
    raise ConfigError(
        f"TMPDIR is too long, or no UTF-8: the path {folder!r} has {size} bytes, and of a folder for sockets may have "
        f"{MAX_SOCKET_PATH - LONGEST_NAME}"
    )


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # undecodable bytes stand in it as surrogates
        return False
    return True


def cpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment. What the user has set stays."""
    wanted = {**PRIMITIVE_CACHES, **MALLOC, "GOMP_SPINCOUNT": str(SPIN_COUNT)}
    if "OMP_WAIT_POLICY" in environ:
        del wanted["GOMP_SPINCOUNT"]
    return {name: value for name, value in wanted.items() if name not in environ}

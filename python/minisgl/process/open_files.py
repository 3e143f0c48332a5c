"""The number of files, sockets included, that each process of the server may have open."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_535  # as vLLM and SGLang set it
FILES_BESIDE_CONNECTIONS = 128  # of the API server: its libraries, sockets to other processes, status requests


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

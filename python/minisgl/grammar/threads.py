"""Threads for llguidance's compiler, which follows chains of rules by recursion: it needs more stack than usual."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 256 * 2**20  # of address space; enough for every grammar of core.MAX_GRAMMAR_CHARS


def compiler_threads(count: int) -> ThreadPoolExecutor:
    """A pool whose threads have all been started with a large stack."""
    pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="grammar")
    started = threading.Barrier(count + 1)
    usual = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(count):
            pool.submit(started.wait)
        started.wait()
    finally:
        threading.stack_size(usual)
    return pool

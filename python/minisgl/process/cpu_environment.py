"""Environment of worker processes: bounds what the libraries below torch take of a CPU and its memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# Loops of an OpenMP thread before it sleeps. libgomp's own 300,000 are some 10 ms, taken from whoever has work; fewer
# than 50,000 slow down steps on a quiet machine. Where the cores are wanted, `engine.cpu_threads` uses one thread.
SPIN_COUNT = 50_000
# Products that oneDNN keeps compiled, one a matrix and number of tokens: some 0.5 MB each. Its own bound is 1024.
CACHED_PRIMITIVES = 128

PRIMITIVE_CACHES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CACHED_PRIMITIVES),
    "LRU_CACHE_CAPACITY": str(CACHED_PRIMITIVES),  # torch's own, in front of it
}


def cpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment. What the user has set stays."""
    wanted = {
        **PRIMITIVE_CACHES,
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "MALLOC_ARENA_MAX": "1",  # memory that one thread frees is there for the next
    }
    if chooses_waiting(environ):
        del wanted["GOMP_SPINCOUNT"]
    return {name: value for name, value in wanted.items() if name not in environ}


def chooses_waiting(environ: Mapping[str, str]) -> bool:
    """Return True if the user says how idle OpenMP threads wait."""
    return "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ

"""Processes of a script that measures several GPUs together: one a rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


def run_ranks(work: Callable[[int, *Ts], None], ranks: int, *args: *Ts) -> None:
    """Call `work(rank, *args)` in a process for each rank, all at the same time. SystemExit if one fails."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, *args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")

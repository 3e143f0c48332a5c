"""Memory budget of a device: computes the number of pages of the KV pool, and of slots and snapshots of states."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.core import pages_for
from minisgl.engine.device import GIB
from minisgl.kvcache.layout import KVLayout
from minisgl.kvcache.window import usual_ratio, windowed_pages

CPU_POOL_LIMIT = 8 << 30  # bytes; a CPU is too slow to use more, and its memory has other uses
# Sequences of full length that a pool on the CPU holds, or more of shorter ones: as prefixes are cached, the pool's
# pages become the process's memory, and a CPU is too slow to use more.
CPU_SEQUENCES = 16
STATE_SHARE = 0.5  # share of the memory for the pool that recurrent states may take; the rest is for pages
SNAPSHOT_SHARE = 0.25  # share of that rest for snapshots of states, unless --state-snapshots is given
SNAPSHOTS_PER_SLOT = 4  # largest number of snapshots for each slot, unless --state-snapshots is given


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a running engine takes on its GPU besides weights and KV pool."""

    steps: int = 0  # for the largest prefill chunk, sampling, slot state
    graphs: int = 0  # for all CUDA graphs


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes for the KV pool, and the figures from which they are computed."""

    pool: int
    total: int  # memory of the device
    free: int  # free memory once the weights are loaded
    needs: Needs = Needs()


def memory_budget(device: torch.device, memory_ratio: float, tp_size: int, needs: Needs) -> MemoryBudget:
    """Return the budget: `memory_ratio` of the device's memory, less the memory in use and the `needs`.

    Ranks on CPUs share the memory of one machine.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryBudget(int(free - (1.0 - memory_ratio) * total) - needs.steps - needs.graphs, total, free, needs)
    page = os.sysconf("SC_PAGE_SIZE")
    free = int(os.sysconf("SC_AVPHYS_PAGES") * page)
    return MemoryBudget(min(int(free * memory_ratio), CPU_POOL_LIMIT) // tp_size, free, free)


def slots_that_fit(wanted: int, layout: KVLayout, budget: int) -> int:
    """Return how many of the `wanted` requests may run if their states take at most STATE_SHARE of the budget."""
    return max(min(wanted, int(STATE_SHARE * budget) // layout.slot_bytes - 1), 1)


def snapshots_that_fit(wanted: int | None, num_slots: int, layout: KVLayout, budget: int) -> int:
    """Return --state-snapshots, or as many snapshots as their share of the budget holds. ConfigError if too many.

    The rest of the budget is for K and V; a snapshot takes as much memory as those of some 3,000 tokens.
    """
    left = max(budget - layout.state_bytes(num_slots), 0)
    fitting = left // layout.slot_bytes
    if wanted is None:
        return min(int(SNAPSHOT_SHARE * fitting), SNAPSHOTS_PER_SLOT * num_slots)
    if wanted > fitting:
        raise ConfigError(
            f"--state-snapshots {wanted} would take {wanted * layout.slot_bytes / GIB:.2f} GiB of "
            f"{left / GIB:.2f} GiB, in which K and V must fit too: use fewer than {fitting}"
        )
    return wanted


def describe_states(layout: KVLayout, num_slots: int, wanted: int, num_snapshots: int) -> str:
    """Return a log line with the size of recurrent states, and the numbers of running requests and snapshots."""
    limited = f", so {num_slots} requests run at a time and not {wanted}" if num_slots < wanted else ""
    return (
        f"recurrent layers keep {layout.slot_bytes / 2**20:.1f} MiB of each running request{limited}; "
        f"up to {num_snapshots} snapshots of such states are kept after cached prefixes"
    )


def pool_pages(
    config: EngineConfig, *, pool_bytes: Callable[[int], int], useful_pages: int, budget: MemoryBudget
) -> int:
    """Return --num-pages, or as many as fit, but at most `useful_pages`. ConfigError if --num-pages do not fit.

    `pool_bytes` returns the bytes of the whole pool for a number of pages, the windowed group's pages included.
    """
    numbers = range(max(useful_pages, config.num_pages or 1) + 1)
    fitting = max(bisect_right(numbers, budget.pool, key=pool_bytes) - 1, 0)
    wanted = config.num_pages if config.num_pages is not None else min(fitting, useful_pages)
    if 1 <= wanted <= fitting:
        return wanted
    wanted = max(wanted, 1)
    remedies = [f"--num-pages {fitting}"] if fitting else []
    needed = pool_bytes(wanted)
    ratio = math.ceil((config.memory_ratio + (needed - budget.pool) / budget.total) * 100) / 100
    if ratio <= 1.0:
        remedies.append(f"--memory-ratio {ratio:.2f}")
    if not remedies:
        remedies.append(
            "more ranks (--tp), or smaller --max-prefill-length, --cuda-graph-max-bs, --max-running-requests"
        )
    raise ConfigError(
        f"too little memory for the KV cache: {wanted} pages of {needed / wanted / 2**20:.2f} MiB need "
        f"{needed / GIB:.2f} GiB, and there are {budget.pool / GIB:.2f} GiB: of {budget.total / GIB:.2f} GiB "
        f"{budget.free / GIB:.2f} are free, {budget.needs.steps / GIB:.2f} go to steps and "
        f"{budget.needs.graphs / GIB:.2f} to CUDA graphs, at --memory-ratio {config.memory_ratio}. "
        f"What would do: {', or '.join(remedies)}"
    )


def pool_size(
    config: EngineConfig,
    layout: KVLayout,
    budget: MemoryBudget,
    *,
    useful_sequences: int,
    context_len: int,
    max_prefill_tokens: int,
) -> tuple[int, int]:
    """Return the number of pages of the pool, and of its windowed group (0 if there is none).

    There are at most as many pages as `useful_sequences` of full length need. ConfigError if a configured number does
    not fit.
    """

    def window_pages(num_pages: int) -> int:
        if layout.window is None:
            return 0
        ratio = config.window_ratio or usual_ratio(layout.window, config.page_size, context_len)
        return windowed_pages(num_pages, ratio, layout.window, config.page_size, max_prefill_tokens)

    num_pages = pool_pages(
        config,
        pool_bytes=lambda pages: layout.pool_bytes(pages, window_pages(pages)),
        useful_pages=useful_sequences * pages_for(context_len, config.page_size),
        budget=budget,
    )
    return num_pages, window_pages(num_pages)

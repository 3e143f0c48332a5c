"""Memory budget of a device: pages of the KV pool, and slots and snapshots of recurrent states. Arithmetic."""

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

CPU_POOL_LIMIT = 8 << 30  # bytes: more is of no use to a CPU and would surprise its owner
# Sequences of full length, or many shorter ones, that a pool on the CPU holds: what it caches becomes the process's
# memory page by page, and a CPU has not the time to use more.
CPU_SEQUENCES = 16
STATE_SHARE = 0.5  # share of the memory for the pool that recurrent states may take; the rest is for pages
SNAPSHOT_SHARE = 0.25  # share of that rest which snapshots of states take, unless --state-snapshots is given
SNAPSHOTS_PER_SLOT = 4  # most snapshots for each slot, unless --state-snapshots is given


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a running engine takes on its GPU besides weights and KV pool."""

    steps: int = 0  # the largest prefill chunk, sampling, slot state
    graphs: int = 0  # all CUDA graphs, of prefills and decodes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes for the KV pool, and the figures from which they were computed."""

    pool: int
    total: int  # memory of the device
    free: int  # free memory once the weights are loaded
    needs: Needs = Needs()


def memory_budget(device: torch.device, memory_ratio: float, tp_size: int, needs: Needs) -> MemoryBudget:
    """Return `memory_ratio` of the device's memory, less what is in use and what steps and graphs will need.

    Ranks on CPUs share the memory of one machine.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryBudget(int(free - (1.0 - memory_ratio) * total) - needs.steps - needs.graphs, total, free, needs)
    page = os.sysconf("SC_PAGE_SIZE")
    free = int(os.sysconf("SC_AVPHYS_PAGES") * page)
    return MemoryBudget(min(int(free * memory_ratio), CPU_POOL_LIMIT) // tp_size, free, free)


def slots_that_fit(wanted: int, layout: KVLayout, budget: int) -> int:
    """Return how many of the `wanted` requests may run: their states take at most STATE_SHARE of the budget's bytes."""
    return max(min(wanted, int(STATE_SHARE * budget) // layout.slot_bytes - 1), 1)


def snapshots_that_fit(wanted: int | None, num_slots: int, layout: KVLayout, budget: int) -> int:
    """Return --state-snapshots, or as many as their share of the budget's bytes holds. ConfigError if too many.

    One costs as much as K and V of some 3,000 tokens, for which the rest of the budget is.
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
    """Tell what the states of running requests take, whether they limit their number, and the number of snapshots."""
    limited = f", so {num_slots} requests run at a time and not {wanted}" if num_slots < wanted else ""
    return (
        f"recurrent layers keep {layout.slot_bytes / 2**20:.1f} MiB of each running request{limited}; "
        f"up to {num_snapshots} snapshots of such states are kept behind cached prefixes"
    )


def pool_pages(
    config: EngineConfig, *, pool_bytes: Callable[[int], int], useful_pages: int, budget: MemoryBudget
) -> int:
    """Return --num-pages, or as many as fit, and no more than all slots together can use. ConfigError if too many.

    `pool_bytes` of a number of pages is that of the whole pool, with the pages that a windowed group has beside them.
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
    """Return the pages of the pool and those of its windowed group, which has none where no layer has a window.

    More pages than `useful_sequences` of full length take are of no use. ConfigError if a wanted number does not fit.
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

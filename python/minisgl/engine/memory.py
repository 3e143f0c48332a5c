"""How many pages the KV pool gets: the arithmetic. `engine.measure` finds what a GPU needs besides."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from minisgl.config import ConfigError, EngineConfig

CPU_POOL_LIMIT = 8 << 30  # bytes: more is of no use to a CPU and would surprise its owner
# Sequences of full length, or many shorter ones, that a pool on the CPU holds: what it caches becomes the process's
# memory page by page, and a CPU has not the time to use more.
CPU_SEQUENCES = 16
GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a running engine takes on its GPU besides weights and KV pool."""

    steps: int = 0  # the largest prefill chunk, sampling, slot state
    graphs: int = 0  # all CUDA graphs, of prefills and decodes


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for the KV pool, and what they were reckoned from."""

    pool: int
    total: int  # the device's
    free: int  # with the weights loaded
    needs: Needs = Needs()


def room_for_pool(device: torch.device, memory_ratio: float, tp_size: int, needs: Needs) -> Room:
    """The ratio of all the device's memory, less what is in use and what will be. CPU ranks share one machine's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Room(int(free - (1.0 - memory_ratio) * total) - needs.steps - needs.graphs, total, free, needs)
    page = os.sysconf("SC_PAGE_SIZE")
    free = int(os.sysconf("SC_AVPHYS_PAGES") * page)
    return Room(min(int(free * memory_ratio), CPU_POOL_LIMIT) // tp_size, free, free)


def pool_pages(config: EngineConfig, *, page_bytes: int, useful_pages: int, room: Room) -> int:
    """--num-pages, or as many as fit, and no more than all slots together can use."""
    fitting = max(room.pool // page_bytes, 0)
    wanted = config.num_pages if config.num_pages is not None else min(fitting, useful_pages)
    if 1 <= wanted <= fitting:
        return wanted
    wanted = max(wanted, 1)
    remedies = [f"--num-pages {fitting}"] if fitting else []
    ratio = math.ceil((config.memory_ratio + (wanted * page_bytes - room.pool) / room.total) * 100) / 100
    if ratio <= 1.0:
        remedies.append(f"--memory-ratio {ratio:.2f}")
    if not remedies:
        remedies.append(
            "more ranks (--tp), or smaller --max-prefill-length, --cuda-graph-max-bs, --max-running-requests"
        )
    raise ConfigError(
        f"too little memory for the KV cache: {wanted} pages of {page_bytes / 2**20:.2f} MiB need "
        f"{wanted * page_bytes / GIB:.2f} GiB, and there are {room.pool / GIB:.2f} GiB: of {room.total / GIB:.2f} GiB "
        f"{room.free / GIB:.2f} are free, {room.needs.steps / GIB:.2f} go to steps and {room.needs.graphs / GIB:.2f} "
        f"to CUDA graphs, at --memory-ratio {config.memory_ratio}. What would do: {', or '.join(remedies)}"
    )

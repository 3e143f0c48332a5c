"""How many pages the KV pool gets."""

from __future__ import annotations

import os

import torch

from minisgl.config import ConfigError, EngineConfig

CPU_POOL_LIMIT = 8 << 30  # bytes: more is of no use to a CPU and would surprise its owner


def free_bytes(device: torch.device, memory_ratio: float, tp_size: int) -> int:
    """What the engine may still allocate: the ratio of all the device's memory, less what is in use."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - memory_ratio) * total)
    page = os.sysconf("SC_PAGE_SIZE")
    return min(int(os.sysconf("SC_AVPHYS_PAGES") * page * memory_ratio), CPU_POOL_LIMIT) // tp_size


def pool_pages(config: EngineConfig, *, page_bytes: int, useful_pages: int, free: int) -> int:
    """--num-pages, or as many as fit, and no more than all slots together can use."""
    fitting = free // page_bytes
    wanted = config.num_pages if config.num_pages is not None else min(fitting, useful_pages)
    if wanted < 1 or wanted > fitting:
        raise ConfigError(
            f"too little memory for the KV cache: {max(wanted, 1)} pages of {page_bytes / 2**20:.2f} MiB do not fit "
            f"into {max(free, 0) / 2**20:.0f} MiB (--memory-ratio {config.memory_ratio}); "
            "lower --num-pages or raise --memory-ratio"
        )
    return wanted

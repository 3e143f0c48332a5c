"""How an engine joins the other tensor-parallel ranks of its model."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from minisgl.config import EngineConfig
from minisgl.distributed import ProcessGroupTP, SingleRank, TPGroup
from minisgl.engine.device import resolve_device
from minisgl.message.socket import Addresses


def join_ranks(
    config: EngineConfig, rank: int, addresses: Addresses, check: Callable[[], None] = lambda: None
) -> TPGroup:
    """Return this rank's tensor-parallel group, once all ranks are there; `check` may end the wait by raising."""
    if config.tp_size == 1:
        return SingleRank()
    device = resolve_device(config, rank)
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.tp_size))
    return ProcessGroupTP.connect(
        rank=rank, size=config.tp_size, init_method=addresses.rendezvous, device=device, check=check
    )

"""The device of an engine: its choice, its dtype, the group of its ranks, and the caches of its libraries."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import SingleRank, TPGroup
from minisgl.distributed.nccl import NcclTP
from minisgl.distributed.shared_memory import SharedMemoryTP
from minisgl.message.socket import Addresses
from minisgl.process.machine import PRIMITIVE_CACHES

GIB = float(1 << 30)  # bytes, as messages give them
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Return the rank's GPU if there are any, unless the configuration says otherwise. ConfigError if it has none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device")
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if not use_cuda:
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ConfigError(f"--tp {config.tp_size}: torch sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", rank)


def resolve_dtype(config: EngineConfig, checkpoint: str) -> torch.dtype:
    """Return --dtype, or the checkpoint's. ConfigError if it is unknown."""
    name = checkpoint if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"--dtype must be auto or one of {', '.join(DTYPES)}, not {name}")
    return DTYPES[name]


def join_ranks(
    config: EngineConfig, rank: int, addresses: Addresses, check: Callable[[], None] = lambda: None
) -> TPGroup:
    """Return this rank's tensor-parallel group, once all ranks are there; `check` may end the wait by raising."""
    if config.tp_size == 1:
        return SingleRank()
    device, meeting = resolve_device(config, rank), addresses.rendezvous
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.tp_size))
        return SharedMemoryTP.connect(rank=rank, size=config.tp_size, init_method=meeting, check=check)
    return NcclTP.connect(
        rank=rank,
        size=config.tp_size,
        init_method=meeting,
        device=device,
        check=check,
        push=config.custom_all_reduce,
    )


def bound_primitive_caches() -> None:
    """Set the environment variables of oneDNN's caches that the user has not set.

    Worker processes get theirs at their start (`process.machine`). A process that imported torch before it
    makes an engine can still set oneDNN's here, which are read at its first use; libgomp has read GOMP_SPINCOUNT.
    """
    for name, value in PRIMITIVE_CACHES.items():
        os.environ.setdefault(name, value)

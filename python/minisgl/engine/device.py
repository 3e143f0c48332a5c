"""Which device and dtype an engine uses."""

from __future__ import annotations

import torch

from minisgl.config import ConfigError, EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """The rank's GPU if there are any, unless the configuration says otherwise. ConfigError if it has none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device")
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if not use_cuda:
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ConfigError(f"--tp {config.tp_size}: torch sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", rank)


def resolve_dtype(config: EngineConfig, checkpoint: str) -> torch.dtype:
    """--dtype, or the checkpoint's."""
    name = checkpoint if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"--dtype must be auto or one of {', '.join(DTYPES)}, not {name}")
    return DTYPES[name]

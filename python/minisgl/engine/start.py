"""Facts of an engine's start: what it serves, on which device, within which bounds, and who is told how far it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from minisgl.config import EngineConfig
from minisgl.distributed import TPGroup
from minisgl.models.config.model_config import ModelConfig

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Facts that are known before a rank's engine loads and measures its parts."""

    config: EngineConfig
    model: ModelConfig
    tp: TPGroup
    device: torch.device
    dtype: torch.dtype
    context_len: int  # most tokens of a sequence, if the pool can hold them
    max_prefill_tokens: int  # of a step
    reuses_prefixes: bool  # prefixes are cached, so that snapshots of recurrent states are worth their memory
    phase: Phase  # context in which a named part of the start runs
    progress: bool  # bars are shown

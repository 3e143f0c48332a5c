"""Where a step's tokens arrive on the host, and how they get there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from minisgl.kernel.select import kernels_missing

_THREADS = 256

CopyTokens: TypeAlias = Callable[[Tensor, Tensor], object]
"""Puts tokens [n] int32 of the device at the beginning of pinned memory, in stream order."""


@dataclass(frozen=True, slots=True)
class OutputBuffer:
    """Memory for the tokens of one step, and what says that they are there."""

    memory: Tensor  # [n] int32, pinned
    done: torch.cuda.Event


def make_token_copy(device: torch.device) -> CopyTokens:
    return _KernelCopy(device) if kernels_missing(device) is None else _copy


def _copy(tokens: Tensor, memory: Tensor) -> None:
    memory[: len(tokens)].copy_(tokens, non_blocking=True)


class _KernelCopy:
    def __init__(self, device: torch.device) -> None:
        from minisgl.kernel.compile import Compiler

        (self._kernel,) = Compiler(device).compile("land.cu", ("land",))

    def __call__(self, tokens: Tensor, memory: Tensor) -> None:
        count = len(tokens)
        if count:
            blocks = -(-count // _THREADS)
            self._kernel((blocks,), _THREADS, tokens.data_ptr(), memory.data_ptr(), np.int32(count))

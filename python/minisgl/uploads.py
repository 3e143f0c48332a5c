"""Copies of host arrays to a device, in stream order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a host array to the device in stream order, without waiting."""
    return pinned(array).to(device, non_blocking=True) if device.type == "cuda" else torch.from_numpy(array)


def pinned(array: NDArray[np.generic]) -> Tensor:
    """Return a copy in pinned memory, which the device may read while the host continues.

    Torch keeps its memory until copies from it are done.
    """
    tensor = torch.empty_like(torch.from_numpy(array), pin_memory=True)
    np.copyto(tensor.numpy(), array)  # torch's copy of a large array would wake all its threads
    return tensor

"""Whether the kernels of csrc/ are used, and so which implementation of the fused operations."""

from __future__ import annotations

import importlib.util
import logging

import torch

from minisgl.kernel.base import Ops
from minisgl.kernel.cpu_ops import CpuOps, multiplies_bfloat16
from minisgl.kernel.torch_ops import TorchOps

logger = logging.getLogger(__name__)

OLDEST = (8, 0)  # compute capability


def make_ops(device: torch.device) -> Ops:
    """Kernels of csrc/ on CUDA, torch elsewhere."""
    if has_kernels(device):
        from minisgl.kernel.cuda_ops import CudaOps

        return CudaOps(device)
    if device.type == "cpu":
        return CpuOps(bfloat16_products=multiplies_bfloat16())
    return TorchOps()


def has_kernels(device: torch.device) -> bool:
    """Whether csrc/ can be compiled and run for this device; says so if a GPU lacks them."""
    missing = kernels_missing(device)
    if missing is not None and device.type == "cuda":
        logger.warning("the kernels of csrc/ need %s; torch is used, slower", missing)
    return missing is None


def kernels_missing(device: torch.device) -> str | None:
    """What csrc/ needs to be compiled and run for this device and is not there, or None."""
    if device.type != "cuda":
        return "a GPU"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda-core (pip install 'minisgl[cuda]')"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "compute capability {}.{}".format(*OLDEST)
    return None

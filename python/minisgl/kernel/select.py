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
    """Whether csrc/ can be compiled and run for this device; says so if not."""
    if device.type != "cuda":
        return False
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        logger.warning("the kernels of csrc/ need cuda-core (pip install 'minisgl[cuda]'); torch is used, slower")
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        logger.warning("the kernels of csrc/ need compute capability %d.%d; torch is used, slower", *OLDEST)
        return False
    return True

"""Which implementation of the fused operations an engine uses."""

from __future__ import annotations

import torch

from minisgl.kernel.base import Ops
from minisgl.kernel.torch_ops import TorchOps


def make_ops(device: torch.device) -> Ops:
    """Kernels of csrc/ on CUDA, plain torch elsewhere."""
    if device.type == "cuda":
        from minisgl.kernel.cuda_ops import CudaOps

        return CudaOps(device)
    return TorchOps()

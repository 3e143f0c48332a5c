"""Choice of the fused operations' implementation: kernels of csrc/ if packages and driver support them, else torch."""

from __future__ import annotations

import logging

import torch

from minisgl.error_text import summary
from minisgl.kernel.base import Ops
from minisgl.kernel.cpu_ops import CpuOps, multiplies_bfloat16
from minisgl.kernel.torch_ops import TorchOps
from minisgl.optional_packages import import_error

logger = logging.getLogger(__name__)

OLDEST = (8, 0)  # compute capability


def make_ops(device: torch.device) -> Ops:
    """Return the operations of a device: on CUDA the kernels of csrc/ if they can run, on a CPU CpuOps, else torch."""
    if has_kernels(device):
        from minisgl.kernel.cuda_ops import CudaOps

        return CudaOps(device)
    if device.type == "cpu":
        return CpuOps(bfloat16_products=multiplies_bfloat16())
    return TorchOps()


def has_kernels(device: torch.device) -> bool:
    """Return True if csrc/ can be compiled and run for this device; log what a GPU lacks."""
    missing = kernels_missing(device)
    if missing is not None and device.type == "cuda":
        logger.warning("the kernels of csrc/ need %s; torch is used, slower", missing)
    return missing is None


def kernels_missing(device: torch.device) -> str | None:
    """Return the name of what is missing to compile and run csrc/ for this device, or None."""
    if device.type != "cuda":
        return "a GPU"
    why = import_error("cuda.core", "cuda-core") or import_error("cuda.bindings", "cuda-bindings")
    if why is not None:
        return f"cuda-core, but {why}"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "compute capability {}.{}".format(*OLDEST)
    try:
        return driver_missing(*_cuda_versions())
    except Exception as error:  # NVRTC's library is absent, or of another CUDA
        return f"NVRTC (pip install 'minisgl[cuda]'), which does not load: {summary(error)}"


def driver_missing(compiler: tuple[int, int], driver: tuple[int, int]) -> str | None:
    """Return what a driver of CUDA version `driver` (major, minor) lacks to load this compiler's output, or None.

    Within one major version of CUDA, older drivers load newer binaries. Drivers of an older major version refuse them.
    """
    if driver[0] >= compiler[0]:
        return None
    return (
        f"an NVIDIA driver for CUDA {compiler[0]} or later: this one is for {driver[0]}.{driver[1]}, "
        f"and nvidia-cuda-nvrtc compiles for {compiler[0]}.{compiler[1]}"
    )


def _cuda_versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return CUDA's (major, minor) of NVRTC and of the driver."""
    from cuda.bindings import driver, nvrtc

    error, number = driver.cuDriverGetVersion()
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuDriverGetVersion: {error.name}")
    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"nvrtcVersion: {error.name}")
    return (int(major), int(minor)), (number // 1000, number % 1000 // 10)

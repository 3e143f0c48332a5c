"""Which attention backend an engine uses."""

from __future__ import annotations

import importlib.util
import logging

import torch

from minisgl.attention.base import AttentionBackend
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import AttentionName, ConfigError

logger = logging.getLogger(__name__)


def make_attention(name: AttentionName, *, page_size: int, device: torch.device) -> AttentionBackend:
    """The named backend; `auto` is FlashAttention 3 where it runs, else torch. ConfigError if it cannot run here."""
    if device.type == "cpu":
        if name not in ("auto", "torch"):
            logger.info("--attn %s is for GPUs; on the CPU attention runs in torch", name)
        return TorchAttention(page_size)
    missing = _fa_missing()
    if name == "fa" and missing:
        raise ConfigError(f"--attn fa: {missing}")
    if name == "torch" or missing:
        if missing and name == "auto":
            logger.warning("attention runs in torch, which is slow: %s", missing)
        return TorchAttention(page_size)
    from minisgl.attention.fa import FlashAttention3

    return FlashAttention3()


def _fa_missing() -> str | None:
    """Why FlashAttention 3 cannot run, or None."""
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashAttention 3 needs a Hopper GPU (compute capability 9.0)"
    if importlib.util.find_spec("sgl_kernel") is None:
        return "FlashAttention 3 needs the package sglang-kernel (pip install 'minisgl[cuda]')"
    return None

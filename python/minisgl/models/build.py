"""A model of a known config on its device, and its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.config import LoadFormat
from minisgl.distributed.group import TPGroup
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import fill_random, load_weights


def build_model(config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """One rank's model with unfilled weights, made where it stays; on the meta device it takes no memory."""
    config.check_tp(tp.size)
    with torch.device(device):
        return CausalLM(config, tp=tp, dtype=dtype).eval()


def load_model(
    config: ModelConfig,
    folder: Path,
    *,
    tp: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "safetensors",
    progress: bool = False,
    seed: int = 0,
) -> CausalLM:
    """One rank's model, filled from the folder or ("dummy") with random weights. Raises ModelError."""
    model = build_model(config, tp=tp, dtype=dtype, device=device)
    if load_format == "dummy":
        fill_random(model, config.initializer_range, seed=seed + tp.rank)
    else:
        load_weights(model, folder, config.checkpoint, progress=progress)
    return model

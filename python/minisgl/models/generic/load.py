"""Loads a causal model of transformers: by transformers, whatever the checkpoint's format, or with random weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from minisgl.distributed import TPGroup
from minisgl.error_text import abridged, in_one_line
from minisgl.models.config.model_config import ModelConfig, WeightError
from minisgl.models.generic.attention_interface import PAGED, register
from minisgl.models.generic.causal_lm import GenericCausalLM, modules_of
from minisgl.models.generic.meta_run import check_sharding
from minisgl.models.generic.model_probe import hf_config, make_empty

logger = logging.getLogger(__name__)


def build_generic(config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> GenericCausalLM:
    """Return the model on the meta device."""
    meta = torch.device("meta")
    with meta:
        return GenericCausalLM(config, make_empty(modules_of(config).config_json, dtype), tp, meta)


def load_generic(
    config: ModelConfig, folder: Path, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, dummy: bool
) -> GenericCausalLM:
    """Return the model as transformers loads it, or with random weights. WeightError if the folder's do not fit."""
    from transformers import AutoModelForCausalLM

    register()
    if tp.size > 1:
        check_sharding(config, tp.size)
    where = device if tp.size == 1 else torch.device("cpu")  # divided before it goes to the device
    if dummy:
        hf = hf_config(modules_of(config).config_json)
        with torch.device(where), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)  # ranks share what is not divided
            model = AutoModelForCausalLM.from_config(hf, dtype=dtype, attn_implementation=PAGED)
    else:
        model = _read(folder, dtype)
    with torch.device(where):
        made = GenericCausalLM(config, model.to(where).eval(), tp, device).to(device)
    if tp.rank == 0:
        logger.info(made.describe())
    return made


def _read(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with loading_by_transformers(folder):
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation=PAGED, local_files_only=True, output_loading_info=True
        )
    if info["missing_keys"]:
        raise WeightError(f"the checkpoint in {folder} lacks {abridged(sorted(info['missing_keys']))}")
    return model


@contextmanager
def loading_by_transformers(folder: Path) -> Iterator[None]:
    """Silence transformers' progress bars and warnings; raise WeightError if it cannot load the folder's model."""
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise WeightError(f"transformers cannot load {folder}: {in_one_line(error)}") from error

"""Loads a causal model of transformers: by transformers, from dequantized tensors, or with random weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from minisgl.distributed import TPGroup
from minisgl.error_text import abridged, in_one_line
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, WeightError
from minisgl.models.config.quantization_config import without_quantization
from minisgl.models.generic.attention_interface import PAGED, register
from minisgl.models.generic.causal_lm import GenericCausalLM, modules_of
from minisgl.models.generic.meta_run import check_sharding
from minisgl.models.generic.model_probe import hf_config, make_empty
from minisgl.models.weights.checkpoint import Checkpoint, has_safetensors

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_MATRICES = (".weight", "_proj")  # ends of names of matrices; buffers may hold integers


def build_generic(config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> GenericCausalLM:
    """Return the model on the meta device."""
    meta = torch.device("meta")
    with meta:
        return GenericCausalLM(config, make_empty(modules_of(config).config_json, dtype), tp, meta)


def load_generic(
    config: ModelConfig,
    folder: Path,
    quantized: Checkpoint | None,
    *,
    tp: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    dummy: bool,
) -> GenericCausalLM:
    """Return the model as transformers loads it, or with random weights. WeightError if the folder's do not fit.

    `quantized`: the folder's checkpoint, if config.json describes its format. It is dequantized here: transformers
    reads few formats on a given machine, and leaves bits that it does not know as values.
    """
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
        model = _read(folder, dtype) if quantized is None else _dequantize(config, folder, quantized, dtype)
    with torch.device(where):
        made = GenericCausalLM(config, model.to(where).eval(), tp, device).to(device)
    if tp.rank == 0:
        logger.info(made.describe())
    return made


def _read(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    if has_safetensors(folder):
        _check_dtypes(Checkpoint(folder, CheckpointNames(), None))
    model, _ = _load(AutoModelForCausalLM, folder, dtype, str(folder), local_files_only=True)
    return model


def _dequantize(config: ModelConfig, folder: Path, quantized: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    _check_dtypes(quantized)
    hf = hf_config(json.dumps(without_quantization(json.loads(modules_of(config).config_json))))
    state = {name: quantized.read(name, dtype) for name in quantized if not _is_beyond(name, config.num_layers)}
    model, info = _load(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)], folder, dtype, None, config=hf, state_dict=state)
    unused = sorted(name for name in info["unexpected_keys"] if quantized.must_be_used(name))
    if unused:
        raise WeightError(f"the checkpoint in {folder} has weights that the model does not use: {abridged(unused)}")
    return model


def _load(
    model_class: Any, folder: Path, dtype: torch.dtype, source: str | None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return transformers' model and what it says of the loading. WeightError if the checkpoint does not fit."""
    with loading_by_transformers(folder):
        model, info = model_class.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=PAGED,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    _check_fit(folder, info)
    return model, info


def _is_beyond(name: str, num_layers: int) -> bool:
    """Return True for a tensor after the last layer: of multi-token prediction, which transformers leaves out."""
    layer = _LAYER.search(name)
    return layer is not None and int(layer[1]) >= num_layers


def _check_dtypes(checkpoint: Checkpoint) -> None:
    """Raise WeightError for a matrix of integers or 8 bits: transformers would take them for values."""
    checkpoint.check_dtypes(name for name in checkpoint if name.endswith(_MATRICES))


def _check_fit(folder: Path, info: dict[str, Any]) -> None:
    """Raise WeightError for a tensor that transformers has not found, or found in another shape."""
    if info["missing_keys"]:
        raise WeightError(f"the checkpoint in {folder} lacks {abridged(sorted(info['missing_keys']))}")
    for name, shape, wanted in sorted(info["mismatched_keys"]):
        raise WeightError(f"{name} has shape {list(shape)}, but config.json asks for {list(wanted)}")


@contextmanager
def loading_by_transformers(folder: Path) -> Iterator[None]:
    """Silence transformers' progress bars and warnings; raise WeightError if it cannot load the folder's model."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # also from torch, pickle and packages of formats
        text = in_one_line(error) or type(error).__name__
        raise WeightError(f"transformers cannot load {folder}: {text}") from error

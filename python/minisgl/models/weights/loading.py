"""Makes a model on its device and fills it from safetensors, tensor by tensor, or with random weights.

A rank reads only the rows and columns that it keeps. Layers know what goes where (`Loadable.weight_slices`). Every
parameter must be filled and every tensor used.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from minisgl.config.engine import LoadFormat, QuantizationMethod
from minisgl.distributed import TPGroup
from minisgl.error_text import abridged
from minisgl.layers.layer_config import AttentionConfig
from minisgl.layers.linear import Linear
from minisgl.layers.mlp import Experts
from minisgl.layers.weight_slice import Loadable, Stackable, WeightSlice
from minisgl.models.base import Model
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel, WeightError
from minisgl.models.decoder import CausalLM
from minisgl.models.generic.load import build_generic, load_generic
from minisgl.models.pooling_model import PoolingModel
from minisgl.models.weights.checkpoint import Checkpoint
from minisgl.models.weights.expert_loader import ExpertLoader
from minisgl.models.weights.forms import Keeps, WeightForms
from minisgl.models.weights.linear_loader import LinearLoader
from minisgl.models.weights.online_quantization import describe, round_weights
from minisgl.progress import progress_bar
from minisgl.quantization.random_levels import format_of
from minisgl.quantization.schemes import Quantization

logger = logging.getLogger(__name__)

# Old checkpoints keep what follows from the config.
_DERIVED = ("rotary_emb.inv_freq",)


def _module_slices(name: str, module: nn.Module, found: Container[str]) -> Iterator[WeightSlice]:
    stacked = list(module.stacked_slices(name)) if isinstance(module, Stackable) else []
    if stacked and stacked[0].name in found:
        yield from stacked
    elif isinstance(module, Loadable):
        yield from module.weight_slices(name)


class _Slice(NamedTuple):
    """A slice, and what fills it if it has no memory yet."""

    part: WeightSlice
    loader: LinearLoader | ExpertLoader | None
    module: str


def _slices(model: nn.Module, forms: WeightForms, found: Container[str] = ()) -> Iterator[_Slice]:
    for name, module in model.named_modules():
        parts = list(_module_slices(name, module, found))
        loader: LinearLoader | ExpertLoader | None = None
        if isinstance(module, Linear):
            loader = LinearLoader(module, forms, parts)
        elif isinstance(module, Experts):
            loader = ExpertLoader(module, forms, parts)
        for part in parts:
            yield _Slice(part, loader if part.target.is_meta else None, name)


@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: Checkpoint, folder: Path, forms: WeightForms, *, progress: bool) -> None:
    """Fill the model. If the checkpoint does not fit, WeightError names tensor and shapes before anything is read."""
    wanted: dict[str, list[_Slice]] = defaultdict(list)
    found = checkpoint.shapes
    for each in _slices(model, forms, found):
        wanted[each.part.name].append(each)
    slices = {name: [each.part for each in parts] for name, parts in wanted.items()}
    _check(slices, found, folder, checkpoint.zero_biases)
    checkpoint.check_dtypes(wanted)

    kept = [part for parts in slices.values() for part in parts]
    size = sum(_bytes(part) for part in kept if not part.tied)
    with progress_bar("Loading weights", size, unit="B", leave=True, shown=progress) as bar:
        for name in checkpoint:
            for part, loader, _ in wanted.get(name, ()):
                if part.is_read:
                    _read(checkpoint, part, loader)
                    bar.update(_bytes(part))
    for part in kept:
        if part.tied and part.name in found:
            _check_tied(checkpoint, part)


def _bytes(part: WeightSlice) -> int:
    return part.target.numel() * part.target.element_size()


def _read(checkpoint: Checkpoint, part: WeightSlice, loader: LinearLoader | ExpertLoader | None) -> None:
    if loader is not None:
        loader.read(checkpoint, part)
        return
    checkpoint.read_into(part.target, part.name, part.source)
    if part.offset:
        part.target.add_(part.offset * checkpoint.factor(part.name))
    if part.factor != 1.0:
        part.target.mul_(part.factor)


def _check_tied(checkpoint: Checkpoint, part: WeightSlice) -> None:
    """Raise WeightError if a checkpoint repeats a tied weight with other values."""
    repeated = torch.empty_like(part.target)
    checkpoint.read_into(repeated, part.name, part.source)
    if not torch.equal(repeated, part.target):
        raise WeightError(
            f"{part.name} differs from the weights that config.json ties it to; "
            "set tie_word_embeddings to false to use it"
        )


@torch.no_grad()
def fill_random(
    model: nn.Module, std: float, forms: WeightForms, *, seed: int, quantization: Quantization | None
) -> None:
    """Fill matrices from normal(0, std) on their device; norms stay 1, biases and padding stay 0.

    Weights that a checkpoint has quantized get random numbers in that format where they are kept in it. What several
    ranks keep, a router for example, is the same on each.
    """
    generator = torch.Generator(forms.device)
    for part, loader, module in _slices(model, forms):
        if not part.is_read or part.target.ndim < 2:
            continue
        generator.manual_seed(seed + zlib.crc32(f"{part.name} {part.source}".encode()))
        if loader is None:
            part.target.normal_(std=std, generator=generator)
        else:
            scheme = None if quantization is None else quantization.scheme_of(module)
            loader.draw(part, format_of(scheme), std, generator)


def _check(
    wanted: dict[str, list[WeightSlice]], found: dict[str, tuple[int, ...]], folder: Path, ignored: Container[str]
) -> None:
    missing = [name for name, parts in wanted.items() if name not in found and not parts[0].tied]
    if missing:
        raise WeightError(f"the checkpoint in {folder} lacks {abridged(missing)}")
    unused = [name for name in found if name not in wanted and name not in ignored and not name.endswith(_DERIVED)]
    if unused:
        raise WeightError(f"the checkpoint in {folder} has weights that the model does not use: {abridged(unused)}")
    for name, parts in wanted.items():
        shape = found.get(name, parts[0].shape)
        if shape != parts[0].shape:
            raise WeightError(f"{name} has shape {list(shape)}, but config.json asks for {list(parts[0].shape)}")


def build_model(config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device) -> Model:
    """Return one rank's model, made where it stays; on the meta device it takes no memory.

    Its weights are not filled, and those of linear layers have no memory yet (`layers.linear.allocate`).
    """
    config.check_tp(tp.size)
    if config.transformers is not None:
        return build_generic(config, tp=tp, dtype=dtype)
    with torch.device(device):
        if config.pooling is not None:
            return PoolingModel(config, config.pooling, tp=tp, dtype=dtype).eval()
        return CausalLM(config, tp=tp, dtype=dtype).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Source of a model's weights, and the form in which they are kept."""

    load_format: LoadFormat = "safetensors"  # dummy: random weights
    seed: int = 0  # of random weights
    quantization: QuantizationMethod = "auto"  # format that weights of floating point are rounded to; auto: none
    keeps: Keeps | None = None  # says which quantized weights of linear layers stay so; None: none do
    keeps_experts: Keeps | None = None  # says which quantized experts stay so
    fp8_activations: bool = False  # products of linear layers may round x, where the weight's format does
    fp8_kv: bool = False  # K and V are stored in FP8, by the checkpoint's scales


AS_STORED = LoadOptions()


def load_model(
    config: ModelConfig,
    folder: Path,
    options: LoadOptions = AS_STORED,
    *,
    tp: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = False,
) -> Model:
    """Return one rank's model, filled from the folder or with random weights. Raises ModelError."""
    quantization, dummy = options.quantization, options.load_format == "dummy"
    described = config.quantization
    stored = described if described is not None and described.schemes else None  # None: no weights are
    if stored is not None and quantization not in ("auto", stored.kind):
        raise UnsupportedModel(f"--quantization {quantization}: the checkpoint has weights of {stored.name} already")
    if config.transformers is not None:
        config.check_tp(tp.size)
        if quantization != "auto":
            raise UnsupportedModel(f"--quantization {quantization}: {config.architecture} is computed by transformers")
        quantized = None if dummy or described is None else Checkpoint(folder, config.checkpoint, described)
        if quantized is not None and quantized.has_kv_scales:
            _use_kv_scales(quantized, config, fp8_kv=options.fp8_kv)
        if tp.rank == 0 and stored is not None and not dummy:
            logger.info(stored.describe(str(dtype).removeprefix("torch.")))
        return load_generic(config, folder, quantized, tp=tp, dtype=dtype, device=device, dummy=dummy)
    method = None if quantization == "auto" or stored is not None else quantization
    forms = WeightForms(device, tp, options.keeps, options.keeps_experts, method, options.fp8_activations)
    checkpoint = None if dummy else Checkpoint(folder, config.checkpoint, described)
    if checkpoint is not None and config.tie_word_embeddings is None:
        config = replace(config, tie_word_embeddings="lm_head.weight" not in checkpoint.shapes)
    model = build_model(config, tp=tp, dtype=dtype, device=device)
    if checkpoint is None:
        fill_random(model, config.initializer_range, forms, seed=options.seed, quantization=stored)
    else:
        if checkpoint.has_kv_scales:
            _use_kv_scales(checkpoint, config, fp8_kv=options.fp8_kv)
        load_weights(model, checkpoint, folder, forms, progress=progress)
    if method is not None:
        round_weights(model, method, forms)
    if tp.rank == 0:
        kept = _kept(model)
        name = str(dtype).removeprefix("torch.")
        if method is not None:
            logger.info(describe(method, name, kept))
        elif stored is not None and not dummy:
            logger.info(stored.describe(name, kept))
    return model


def _use_kv_scales(checkpoint: Checkpoint, config: ModelConfig, *, fp8_kv: bool) -> None:
    """Apply the scales to weights, or leave them aside."""
    if not fp8_kv:
        logger.info("the scales of an 8-bit KV cache are left aside: K and V have 16 bits (--kv-cache-dtype)")
        return
    for layer in config.layers:
        attention = layer.attention
        applied = not isinstance(attention, AttentionConfig) or attention.scales_kv_by_weights
        if applied and config.transformers is None:
            continue
        raise UnsupportedModel(
            f"--kv-cache-dtype fp8_e4m3: scales of {config.architecture}'s KV cache (k_scale, v_scale) are not "
            "supported; auto leaves them aside"
        )
    checkpoint.apply_kv_scales()


def _kept(model: nn.Module) -> str:
    """Tell what stays quantized in a loaded model; nothing for nothing."""
    modules = list(model.modules())
    matrices = sum(isinstance(module, Linear) and module.levels is not None for module in modules)
    layers = sum(isinstance(module, Experts) and module.packed is not None for module in modules)
    counts = ((f"{matrices} matrices", matrices), (f"the experts of {layers} layers", layers))
    return " and ".join(text for text, count in counts if count)

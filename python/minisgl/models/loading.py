"""Makes a model on its device and fills it from safetensors, tensor by tensor, or with random weights.

A rank reads only the rows and columns that it keeps. Layers know what goes where (`Loadable.weight_slices`). Every
parameter must be filled and every tensor used.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minisgl.config import LoadFormat
from minisgl.distributed import TPGroup
from minisgl.layers.weight_slice import Loadable, Stackable, WeightSlice
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, WeightError
from minisgl.models.decoder import CausalLM
from minisgl.models.hub import checkpoint_files, some
from minisgl.progress import progress_bar

logger = logging.getLogger(__name__)

# Old checkpoints keep what follows from the config.
_DERIVED = ("rotary_emb.inv_freq",)


def model_slices(model: nn.Module, found: Container[str] = ()) -> Iterator[WeightSlice]:
    """Slices that the model keeps of a checkpoint with the tensors `found`, in the order of its modules."""
    for name, module in model.named_modules():
        stacked = list(module.stacked_slices(name)) if isinstance(module, Stackable) else []
        if stacked and stacked[0].name in found:
            yield from stacked
        elif isinstance(module, Loadable):
            yield from module.weight_slices(name)


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path, names: CheckpointNames, *, progress: bool = False) -> None:
    """Fill the model. If the checkpoint does not fit, WeightError names tensor and shapes before anything is read."""
    wanted: dict[str, list[WeightSlice]] = defaultdict(list)
    files = checkpoint_files(folder)
    found = _shapes(files, names)
    for part in model_slices(model, found):
        wanted[part.name].append(part)
    _check(wanted, found, folder)

    kept = [part for parts in wanted.values() for part in parts]
    size = sum(part.target.numel() * part.target.element_size() for part in kept if not part.tied)
    bar = progress_bar("Loading weights", size, unit="B", leave=True, shown=progress)
    tied: list[tuple[Path, str, WeightSlice]] = []
    with bar:
        for path in files:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    for part in wanted.get(names.ours(name) or "", ()):
                        if part.tied:
                            tied.append((path, name, part))
                            continue
                        part.target.copy_(_read(file, name, part))
                        if part.offset:
                            part.target.add_(part.offset)
                        bar.update(part.target.numel() * part.target.element_size())
    for path, name, part in tied:
        with _open(path) as file:
            repeated = _read(file, name, part).to(part.target.device, part.target.dtype)
        if not torch.equal(repeated, part.target):
            raise WeightError(
                f"{path.name}: {name} differs from the weights that config.json ties it to; "
                "set tie_word_embeddings to false to use it"
            )


@torch.no_grad()
def fill_random(model: nn.Module, std: float, *, seed: int) -> None:
    """Fill matrices from normal(0, std) on their device; norms stay 1, biases and padding stay 0."""
    generator: torch.Generator | None = None
    for part in model_slices(model):
        if part.tied or part.target.ndim < 2:
            continue
        if generator is None:
            generator = torch.Generator(part.target.device).manual_seed(seed)
        part.target.normal_(std=std, generator=generator)


def _check(wanted: dict[str, list[WeightSlice]], found: dict[str, tuple[int, ...]], folder: Path) -> None:
    missing = [name for name, parts in wanted.items() if name not in found and not parts[0].tied]
    if missing:
        raise WeightError(f"the checkpoint in {folder} lacks {some(missing)}")
    unused = [name for name in found if name not in wanted and not name.endswith(_DERIVED)]
    if unused:
        raise WeightError(f"the checkpoint in {folder} has weights that the model does not use: {some(unused)}")
    for name, parts in wanted.items():
        shape = found.get(name, parts[0].shape)
        if shape != parts[0].shape:
            raise WeightError(f"{name} has shape {list(shape)}, but config.json asks for {list(parts[0].shape)}")


def _shapes(files: list[Path], names: CheckpointNames) -> dict[str, tuple[int, ...]]:
    """Return shapes by the model's own names of all tensors but those that text does not need, which are logged."""
    shapes, left_out = {}, list[str]()
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                if (ours := names.ours(name)) is not None:
                    shapes[ours] = tuple(file.get_slice(name).get_shape())
                else:
                    left_out.append(next(prefix for prefix in names.ignored if name.startswith(prefix)))
    if left_out:
        prefixes = ", ".join(sorted({prefix.removesuffix(".") for prefix in left_out}))
        logger.info("%d tensors that plain text does not need are left out: %s", len(left_out), prefixes)
    return shapes


def _open(path: Path) -> Any:  # safe_open's methods have no types
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} is not a readable safetensors file: {error}") from error


def _read(file: Any, name: str, part: WeightSlice) -> Tensor:
    if all(axis == slice(None) for axis in part.source):
        tensor: Tensor = file.get_tensor(name)
    else:
        tensor = file.get_slice(name)[part.source]
    return tensor


def build_model(config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Return one rank's model with unfilled weights, made where it stays; on the meta device it takes no memory."""
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
    """Return one rank's model, filled from the folder or ("dummy") with random weights. Raises ModelError."""
    model = build_model(config, tp=tp, dtype=dtype, device=device)
    if load_format == "dummy":
        fill_random(model, config.initializer_range, seed=seed + tp.rank)
    else:
        load_weights(model, folder, config.checkpoint, progress=progress)
    return model

"""Fills a model from safetensors, tensor by tensor; a rank reads only the rows and columns that it keeps.

What goes where is the layers' knowledge (`Loadable.pieces`). Every parameter must be filled and every tensor used.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from minisgl.layers.pieces import Loadable, Piece, Stackable
from minisgl.models.config import WeightError
from minisgl.models.hub import checkpoint_files, some

# Old checkpoints keep what follows from the config.
_DERIVED = ("rotary_emb.inv_freq",)


def model_pieces(model: nn.Module, found: Container[str] = ()) -> Iterator[Piece]:
    """What the model keeps of a checkpoint with the tensors `found`, in the order of its modules."""
    for name, module in model.named_modules():
        stacked = list(module.stacked_pieces(name)) if isinstance(module, Stackable) else []
        if stacked and stacked[0].name in found:
            yield from stacked
        elif isinstance(module, Loadable):
            yield from module.pieces(name)


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path, *, progress: bool = False) -> None:
    """Raises WeightError, naming tensor and shapes, before anything is read if the checkpoint does not fit."""
    wanted: dict[str, list[Piece]] = defaultdict(list)
    files = checkpoint_files(folder)
    found = _shapes(files)
    for piece in model_pieces(model, found):
        wanted[piece.name].append(piece)
    _check(wanted, found, folder)

    kept = [piece for pieces in wanted.values() for piece in pieces]
    size = sum(piece.target.numel() * piece.target.element_size() for piece in kept if not piece.tied)
    bar = tqdm(total=size, desc="Loading weights", unit="B", unit_scale=True, file=sys.stderr, disable=not progress)
    tied: list[tuple[Path, Piece]] = []
    with bar:
        for path in files:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    for piece in wanted.get(name, ()):
                        if piece.tied:
                            tied.append((path, piece))
                            continue
                        piece.target.copy_(_read(file, piece))
                        bar.update(piece.target.numel() * piece.target.element_size())
    for path, piece in tied:
        with _open(path) as file:
            repeated = _read(file, piece).to(piece.target.device, piece.target.dtype)
        if not torch.equal(repeated, piece.target):
            raise WeightError(
                f"{path.name}: {piece.name} differs from the weights that config.json ties it to; "
                "set tie_word_embeddings to false to use it"
            )


@torch.no_grad()
def fill_random(model: nn.Module, std: float, *, seed: int) -> None:
    """Matrices from normal(0, std) made on their device; norms stay 1, biases and padding stay 0."""
    generator: torch.Generator | None = None
    for piece in model_pieces(model):
        if piece.tied or piece.target.ndim < 2:
            continue
        if generator is None:
            generator = torch.Generator(piece.target.device).manual_seed(seed)
        piece.target.normal_(std=std, generator=generator)


def _check(wanted: dict[str, list[Piece]], found: dict[str, tuple[int, ...]], folder: Path) -> None:
    missing = [name for name, pieces in wanted.items() if name not in found and not pieces[0].tied]
    if missing:
        raise WeightError(f"the checkpoint in {folder} lacks {some(missing)}")
    unused = [name for name in found if name not in wanted and not name.endswith(_DERIVED)]
    if unused:
        raise WeightError(f"the checkpoint in {folder} has weights that the model does not use: {some(unused)}")
    for name, pieces in wanted.items():
        shape = found.get(name, pieces[0].shape)
        if shape != pieces[0].shape:
            raise WeightError(f"{name} has shape {list(shape)}, but config.json asks for {list(pieces[0].shape)}")


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def _open(path: Path) -> Any:  # safe_open's methods have no types
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} is not a readable safetensors file: {error}") from error


def _read(file: Any, piece: Piece) -> Tensor:
    if all(part == slice(None) for part in piece.source):
        tensor: Tensor = file.get_tensor(piece.name)
    else:
        tensor = file.get_slice(piece.name)[piece.source]
    return tensor

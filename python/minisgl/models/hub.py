"""Finds a model: from the name that a user gives to a folder on disk. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import minisgl
from minisgl.config import DEMO_MODEL, SourceConfig
from minisgl.config.source import ModelSource
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.download import download_model

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Download = Callable[[str, str | None, ModelSource, bool], Path]


class ModelFolders(NamedTuple):
    """Local folders of a model and of its tokenizer, often the same one."""

    model: Path
    tokenizer: Path


def demo_folder() -> Path:
    """Return the folder of the model that comes with the package."""
    return Path(minisgl.__file__).parent / "demo"


def find_model(source: SourceConfig, *, weights: bool = True, download: Download = download_model) -> ModelFolders:
    """Return the local folders of a model and its tokenizer, downloaded if need be. Raises UnsupportedModel."""
    hub = source.model_source
    folder = model_folder(source.model, weights=weights, revision=source.revision, hub=hub, download=download)
    if source.tokenizer is None:
        return ModelFolders(folder, folder)
    try:
        return ModelFolders(folder, model_folder(source.tokenizer, weights=False, hub=hub, download=download))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"--tokenizer: {error}") from error


def model_folder(
    name: str,
    *,
    weights: bool = True,
    revision: str | None = None,
    hub: ModelSource = "huggingface",
    download: Download = download_model,
) -> Path:
    """Return the local folder of the demo model, a folder or a hub id, downloaded if need be.

    `weights=False` leaves out the safetensors (dummy weights, tokenizers). Raises UnsupportedModel.
    """
    folder = demo_folder() if name == DEMO_MODEL else Path(os.path.expanduser(name))
    try:
        exists, is_folder = folder.exists(), folder.is_dir()
    except OSError as error:  # the name is too long, or a folder above may not be searched
        raise UnsupportedModel(f"model {name} cannot be read: {error.strerror}") from error
    if name and is_folder:
        if revision is not None:
            raise UnsupportedModel(f"--revision {revision} is of a hub's model, but {name} is a folder")
        return folder
    if name and exists:
        raise UnsupportedModel(f"model {name} is a file; a model is a folder or a hub id")
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise UnsupportedModel(f"model {name} does not exist: no such folder, and not a hub id (owner/name)")
    return download(name, revision, hub, weights)

"""Tiny models saved as a hub snapshot would be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tiny import make_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """kind -> (the transformers model, its folder), made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = make_model(kind)
            model.save_pretrained(folder)
            made[kind] = (model, folder)
        return made[kind]

    return get

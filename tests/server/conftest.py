"""A small random model with a large vocabulary, and a server on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server
from support.small_models import save_tiny_qwen3


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over 38,000 tokens: its answers are full of cut characters, emoji and CJK.

    In its context fits a request that outlasts any pause of a test.
    """
    folder = tmp_path_factory.mktemp("models") / "random-model"
    return save_tiny_qwen3(folder, tie_word_embeddings=True, max_position_embeddings=32768)


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    with Server("--model", str(random_model), "--num-tokenizer", "2", "--page-size", "4") as server:
        yield server
        server.wait_idle()

"""A small random model with a large vocabulary, and a server on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.server import Server
from support.unicode_tokenizer import save_unicode_tokenizer


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over 38,000 tokens: its answers are full of cut characters, emoji and CJK."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tmp_path_factory.mktemp("tokenizer")
    config = Qwen3Config(
        vocab_size=save_unicode_tokenizer(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "random-model"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in tokenizer.iterdir():
        file.replace(folder / file.name)
    return folder


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    with Server("--model", str(random_model), "--num-tokenizer", "2", "--page-size", "4") as server:
        yield server
        server.wait_idle()

"""A small random model with the real Qwen vocabulary, and a server on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.server import Server
from tokenizer.qwen import Unavailable, qwen_folder


@pytest.fixture(scope="session")
def qwen_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over 151,936 tokens: its answers are full of cut characters, emoji and CJK."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    try:
        vocabulary = qwen_folder()
    except Unavailable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("qwen") / "random-qwen"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
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
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in vocabulary.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def server(qwen_model: Path) -> Iterator[Server]:
    with Server("--model", str(qwen_model), "--num-tokenizer", "2", "--page-size", "4") as server:
        yield server
        server.wait_idle()

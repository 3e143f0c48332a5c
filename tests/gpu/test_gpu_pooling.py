"""Vectors of embedding models and rerankers on a GPU, against transformers with the same weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from minisgl import LLM
from minisgl.models.hub import demo_folder
from pooling.pooling_models import Reference, save, save_embedder, texts

pytestmark = pytest.mark.gpu

# Qwen3-Embedding-0.6B's shape, of four layers.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}
PROMPTS = [*texts(60), *(" ".join(texts(20, seed)) for seed in range(1, 5))]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are values of bfloat16, as those that people publish."""
    folder = save_embedder(tmp_path_factory.mktemp("models") / "embedder", **SHAPE)
    path = folder / "model.safetensors"
    weights = {name: value.bfloat16().float() for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("dtype", "cosine"), [("bfloat16", 0.9999), ("float16", 0.99999), ("float32", 0.999999)])
def test_embeddings(embedder: Path, dtype: str, cosine: float) -> None:
    """Prompts are computed whole, in chunks of one batch, and from the prefix cache."""
    reference = Reference(embedder, "Model")
    ids = [reference.ids(text) for text in PROMPTS]
    assert max(map(len, ids)) > 500
    expected = np.stack([reference.embedding(one) for one in ids])
    for options in ({}, {"max_extend_tokens": 100, "page_size": 16}):
        with LLM(str(embedder), dtype, device="cuda", **options) as llm:
            for _ in range(2):
                assert float((llm.embed(PROMPTS) * expected).sum(1).min()) > cosine
            assert llm.loop.scheduler.counts()["prefix_tokens_hit"] > 0
            llm.check_idle()


def test_a_reranker(tmp_path: Path) -> None:
    folder = save(tmp_path / "causal", "ForCausalLM", tie_word_embeddings=True, **SHAPE)
    queries, documents = texts(20, seed=2), texts(20, seed=3)

    def scores(dtype: str, device: str) -> list[float]:
        with LLM(str(folder), dtype, device=device, runner="pooling", convert="classify") as llm:
            return llm.score(queries, documents)

    assert scores("bfloat16", "cuda") == pytest.approx(scores("float32", "cpu"), abs=0.02)


def test_trained_weights() -> None:
    reference = Reference(demo_folder(), "Model")
    prompts = ["What is Minisgl?", "How many tokens has a page of the KV cache?", "word"]
    with LLM("demo", "bfloat16", device="cuda", runner="pooling") as llm:
        expected = np.stack([reference.embedding(llm.tokenizer.encode(text).tolist()) for text in prompts])
        assert float((llm.embed(prompts) * expected).sum(1).min()) > 0.9999

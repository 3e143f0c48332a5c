"""Small model folders with random weights.

For GPU tests: Qwen3 and SmolLM2 shapes cut down, and a tokenizer of one token a byte. For others: a tiny Qwen3, and the
demo model with a long context.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl.models.hub import demo_folder
from support.tiny_tokenizer import save_byte_tokenizer
from support.unicode_tokenizer import save_unicode_tokenizer

_TOKENIZER_VOCAB = 5000  # at most: larger vocabularies have tokens without text


def save_smollm2(path: Path, *, dtype: str = "bfloat16", num_layers: int = 4, vocab_size: int = 5000) -> Path:
    """A SmolLM2-135M of fewer layers and another vocabulary: 9 heads, 3 KV heads, head size 64; random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        num_hidden_layers=num_layers,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(path)
    save_byte_tokenizer(path, min(vocab_size, _TOKENIZER_VOCAB))
    return path


def save_qwen3(path: Path, *, weights: bool, vocab_size: int = 5000, num_layers: int = 3, **changes: Any) -> Path:
    """A Qwen3-0.6B of fewer layers and another vocabulary, in bfloat16, with random weights or without any.

    `changes` are further fields of its configuration.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "dtype": "bfloat16",
        "architectures": ["Qwen3ForCausalLM"],
        **changes,
    }
    config = Qwen3Config(vocab_size=vocab_size, num_hidden_layers=num_layers, **fields)
    if weights:
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    else:
        config.save_pretrained(path)
    save_byte_tokenizer(path, min(vocab_size, _TOKENIZER_VOCAB))
    return path


def save_tiny_qwen3(path: Path, **changes: Any) -> Path:
    """A Qwen3 of two tiny layers in float32 over the 38,000 tokens of `unicode_tokenizer`.

    `changes` are further fields of its configuration.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path.mkdir(exist_ok=True)
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "dtype": "float32",
        **changes,
    }
    config = Qwen3Config(vocab_size=save_unicode_tokenizer(path), **fields)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def save_long_demo(path: Path) -> Path:
    """The demo model with a context of 32,768 tokens, so that an answer may outlast any pause of a test."""
    path.mkdir()
    for file in demo_folder().iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    config = json.loads((demo_folder() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return path


def spoil_token(path: Path, token: int) -> None:
    """Make a model compute NaN wherever a token stands. A head of its own never chooses that token."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[token] = torch.nan
        elif name == "lm_head.weight":
            weight[token] = 0.0
    save_file(weights, path / "model.safetensors", {"format": "pt"})

"""Folders of well-known model shapes, for engines that fill in random weights: nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 151936
BOS, EOS = 256, 257
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that make a Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool  # embedding and output head are one


SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 3072, tied=True),
    "1.7b": Shape(2048, 28, 16, 8, 6144, tied=True),
    "8b": Shape(4096, 36, 32, 8, 12288, tied=False),
    "14b": Shape(5120, 40, 40, 8, 17408, tied=False),
    "32b": Shape(5120, 64, 64, 8, 25600, tied=False),
}


def make_shape(name: str, folder: Path) -> Path:
    """Write `folder/qwen3-NAME`: a configuration and a tokenizer of one token a byte. No weights."""
    shape = SHAPES[name]
    path = folder / f"qwen3-{name}"
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 40960,
        "max_window_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    _byte_tokenizer().save(str(path / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 40960,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


def _byte_tokenizer() -> Tokenizer:
    """One token a byte; every other id decodes to some text, so that each token shows in a stream."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>"]
    names += [f"<{index}>" for index in range(len(names), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return tokenizer


def read_vocab_size(folder: Path) -> int:
    """Of any model folder."""
    config = json.loads((folder / "config.json").read_text())
    size: int = config.get("vocab_size") or config["text_config"]["vocab_size"]
    return size


def read_context(folder: Path) -> int:
    """Tokens that any model folder says it holds."""
    config = json.loads((folder / "config.json").read_text())
    size: int = config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"]
    return size

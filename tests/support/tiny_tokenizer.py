"""Tokenizers for tiny models, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def save_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """One token a byte (the first `vocab_size` bytes), ids beyond 255 decode to `<id>`; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet[:vocab_size] + [f"<{index}>" for index in range(len(alphabet), vocab_size)]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))

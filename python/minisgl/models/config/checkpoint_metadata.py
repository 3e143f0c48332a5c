"""Metadata of a checkpoint and its tokenizer that config.json lacks. No torch, no tokenizer libraries.

A missing or unreadable file counts as empty here; code that needs the file reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from minisgl.config import ConfigError
from minisgl.tokenizer.tokenizer_config import load_tokenizer_config, special_tokens

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def checkpoint_dtype(folder: Path) -> str | None:
    """Return the dtype of the first floating tensor by name, as transformers does if config.json has none."""
    files = [folder / "model.safetensors", *sorted(folder.glob("model-*.safetensors"))]
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            found = [file.get_slice(name).get_dtype() for name in sorted(file.keys())]
    except (OSError, SafetensorError):
        return None
    return next((_DTYPES[name] for name in found if name in _DTYPES), None)


class _Token(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    model: msgspec.Raw  # megabytes, rarely parsed
    added_tokens: list[_Token] = []


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


def tokenizer_eos(folder: Path) -> int | None:
    """Return the tokenizer's eos_token, which in some folders is the only name of the end of a turn."""
    try:
        config = load_tokenizer_config(folder)
    except (OSError, ConfigError):
        return None
    text = special_tokens(config).get("eos_token")
    if text is None:
        return None
    listed = config.get("added_tokens_decoder")
    for token_id, token in listed.items() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and token.get("content") == text and token_id.isdecimal():
            return int(token_id)
    return vocabulary_ids(folder, [text]).get(text)


def vocabulary_ids(folder: Path, texts: Sequence[str]) -> dict[str, int]:
    """Return the ids of the given tokens that tokenizer.json contains in this spelling."""
    try:
        content = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerJson)
        found = {added.content: added.id for added in content.added_tokens if added.content in texts}
        missing = [text for text in texts if text not in found]
        if missing:
            vocabulary = msgspec.json.decode(content.model, type=_Model).vocab
            if not isinstance(vocabulary, dict):
                vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
            found |= {text: vocabulary[text] for text in missing if text in vocabulary}
    except (OSError, msgspec.DecodeError):
        return {}
    return found

"""A model folder's vocabulary: to encode with, to decode with.

A tokenizer.json is read by `tokenizers` alone. Other formats are converted by transformers, which is slow and large
and imported only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from minisgl.config import ConfigError
from minisgl.tokenizer.folder import load_tokenizer_config
from minisgl.tokenizer.incremental import ByteLevelDecoder, TextDecoder, is_byte_level, make_decoder

CONVERTIBLE = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer; ConfigError if it has none that works. It neither cuts nor pads what it encodes."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ConfigError(f"{path} cannot be read: {error}") from error
        _add_missing_tokens(tokenizer, load_tokenizer_config(folder))
    else:
        tokenizer = _convert(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerJson(msgspec.Struct):
    """The parts of tokenizer.json that decoding needs."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


def load_decoder(folder: Path) -> TextDecoder:
    """The decoder of the folder's tokenizer; ConfigError if there is none that works.

    A byte-level one is made from the vocabulary alone, which takes a third of the time and memory of the tokenizer.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_TokenizerJson)
        except msgspec.DecodeError:
            return make_decoder(load_tokenizer(folder))  # which says what is wrong, if anything is
        vocabulary = content.model.vocab
        if is_byte_level(content.decoder) and isinstance(vocabulary, dict):
            listed: dict[str, dict[str, Any]] = load_tokenizer_config(folder).get("added_tokens_decoder") or {}
            added = {int(key): (token["content"], token.get("special", False)) for key, token in listed.items()}
            added |= {vocabulary.get(t.content, t.id): (t.content, t.special) for t in content.added_tokens}
            return ByteLevelDecoder(vocabulary, added)
    return make_decoder(load_tokenizer(folder))


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Some folders name added tokens in tokenizer_config.json only. Each must get the id that is written there."""
    listed: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    for token_id, fields in sorted((int(key), value) for key, value in listed.items()):
        if tokenizer.id_to_token(token_id) is not None:
            continue
        content = fields["content"]
        token = AddedToken(
            content,
            single_word=fields.get("single_word", False),
            lstrip=fields.get("lstrip", False),
            rstrip=fields.get("rstrip", False),
            normalized=fields.get("normalized", True),
            special=fields.get("special", False),
        )
        if fields.get("special", False):
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(content) != token_id:
            raise ConfigError(
                f"tokenizer_config.json gives the token {content!r} the id {token_id}, which tokenizer.json skips"
            )


def _convert(folder: Path) -> Tokenizer:
    found = [name for name in CONVERTIBLE if (folder / name).is_file()]
    found += sorted(path.name for path in folder.glob("*.tiktoken"))
    if not found:
        raise ConfigError(f"{folder} has no tokenizer: neither tokenizer.json nor a file that could be converted")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return Tokenizer.from_str(converted.backend_tokenizer.to_str())
    except Exception as error:  # whatever transformers and the converters under it raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{folder} has no tokenizer.json, and {found[0]} cannot be converted: {reason}") from error

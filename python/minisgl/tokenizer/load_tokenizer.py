"""Loads the vocabulary of a model folder as a tokenizer, to encode, or as a decoder.

A tokenizer.json is read by `tokenizers` alone. Other formats are converted by transformers, which is slow and large
and imported only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from minisgl.config import ConfigError
from minisgl.error_text import file_error, first_line
from minisgl.optional_packages import can_be_found
from minisgl.tokenizer.decoder_choice import is_byte_level, make_decoder, make_plain
from minisgl.tokenizer.decoders.base import TextDecoder
from minisgl.tokenizer.decoders.byte_level import ByteLevelDecoder
from minisgl.tokenizer.tokenizer_config import Added, changed_tokens, load_tokenizer_config

CONVERTIBLE = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
SENTENCEPIECE = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}  # module: package


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the folder's tokenizer, without truncation and padding; ConfigError if none works."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ConfigError(f"{path} cannot be read: {file_error(path, error)}") from error
        config = load_tokenizer_config(folder)
        _complete(tokenizer, config)
        tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    else:
        tokenizer = _convert(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _match_as_written(tokenizer)
    make_plain(tokenizer)
    return tokenizer


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerJson(msgspec.Struct):
    """Parts of tokenizer.json that decoding needs."""

    model: _Model
    added_tokens: list[Added] = []
    decoder: dict[str, Any] | None = None


def load_decoder(folder: Path) -> TextDecoder:
    """Load the decoder of the folder's tokenizer; ConfigError if none works.

    A byte-level decoder needs only the vocabulary, which takes a third of the tokenizer's time and memory.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_TokenizerJson)
        except msgspec.DecodeError:
            return make_decoder(load_tokenizer(folder))  # raises ConfigError if the file is broken
        vocabulary = content.model.vocab
        added = [token.content for token in content.added_tokens]
        if isinstance(vocabulary, dict) and is_byte_level(content.decoder, [*vocabulary, *added]):
            own = [msgspec.structs.replace(t, id=vocabulary.get(t.content, t.id)) for t in content.added_tokens]
            ids = {token.content: token.id for token in own} | vocabulary
            changed = changed_tokens(load_tokenizer_config(folder), own, ids.get, len(vocabulary))
            return ByteLevelDecoder(vocabulary, {t.id: (t.content, t.special) for t in (*own, *changed)})
    return make_decoder(load_tokenizer(folder))


def _complete(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Add the added tokens that only the configuration lists."""
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=False)
    changed = changed_tokens(config, _added_tokens(tokenizer), tokenizer.token_to_id, vocab_size)
    tokenizer.add_tokens([_for_the_library(token) for token in changed])


def _match_as_written(tokenizer: Tokenizer) -> None:
    """Match added tokens of which the normalizer leaves nothing, such as U+200D, before the text is normalized.

    `tokenizers` would find such a token everywhere in normalized text: it panics, or takes all memory for two letters.
    """
    normalizer = tokenizer.normalizer
    if normalizer is None:
        return
    empty = [
        token for token in _added_tokens(tokenizer) if token.normalized and not normalizer.normalize_str(token.content)
    ]
    tokenizer.add_tokens([_for_the_library(msgspec.structs.replace(token, normalized=False)) for token in empty])


def _added_tokens(tokenizer: Tokenizer) -> list[Added]:
    return [Added(token_id, **token.__getstate__()) for token_id, token in tokenizer.get_added_tokens_decoder().items()]


def _for_the_library(token: Added) -> AddedToken:
    fields = msgspec.structs.asdict(token)
    del fields["id"]
    return AddedToken(**fields)


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
        reason = first_line(error)
        lacking = [package for module, package in SENTENCEPIECE.items() if not can_be_found(module)]
        if lacking and _is_sentencepiece(folder / found[0]):
            reason = f"this takes packages that are not installed (pip install {' '.join(lacking)})"
        raise ConfigError(f"{folder} has no tokenizer.json, and {found[0]} cannot be converted: {reason}") from error


def _is_sentencepiece(path: Path) -> bool:
    """Return True for a serialized protobuf message, False for tiktoken's lines of text."""
    with path.open("rb") as file:
        return file.read(1) == b"\n"

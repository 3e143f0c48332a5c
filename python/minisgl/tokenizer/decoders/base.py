"""Interface of streaming decoders, which turn output ids into text, one token at a time.

The pieces of a stream and its flush together equal what `tokenizers` decodes from all ids at once, for any ids (or what
the ids add to the text before, if the stream continues one). Each character comes with the first token after which no
further token can change it.

This module has the interface of a decoder and the tables of tokens that all decoders use.
"""

from __future__ import annotations

import codecs
import re
from typing import Literal, Protocol

from tokenizers import Tokenizer

from minisgl.message.logprobs import TokenTexts
from minisgl.panics import panics_as_errors

REPLACEMENT = "\ufffd"

AddedTokens = dict[int, tuple[str, bool]]  # id: (content, True if it is special)


class TextStream(Protocol):
    """Decoding state of one sequence."""

    def feed(self, token: int) -> str:
        """Add a token; return the text that has become certain. LibraryPanic if the ids cannot be decoded."""

    def flush(self) -> str:
        """Return the rest of the text, when no token follows. LibraryPanic if the ids cannot be decoded."""


class TextDecoder(TokenTexts, Protocol):
    """Decoder of a tokenizer, which all sequences share."""

    def stream(self, skip_special_tokens: bool, keep: tuple[str, ...] = (), *, continues: bool = False) -> TextStream:
        """Begin a sequence; special tokens of `keep` are not skipped. `continues`: its text follows other text."""


class SpecialTokens:
    """Tokens that `skip_special_tokens` leaves out: all whose text equals a special token's."""

    def __init__(self, tokens: dict[int, str], added: AddedTokens) -> None:
        special = {content for content, is_special in added.values() if is_special}
        self.texts = {token_id: token for token_id, token in tokens.items() if token in special}
        self._skipped: dict[tuple[str, ...], frozenset[int]] = {}  # by the tokens to keep

    def skipped(self, skip_special_tokens: bool, keep: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens to leave out: all but those of `keep`, or none."""
        if not skip_special_tokens:
            return frozenset()
        if keep not in self._skipped:
            self._skipped[keep] = frozenset(token_id for token_id, token in self.texts.items() if token not in keep)
        return self._skipped[keep]


class TokenTable:
    """Tokens of a tokenizer by id, with its special tokens and (if `byte_fallback`) the tokens that are one byte."""

    def __init__(self, tokenizer: Tokenizer, *, byte_fallback: bool) -> None:
        added = {token_id: (t.content, t.special) for token_id, t in tokenizer.get_added_tokens_decoder().items()}
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self.tokens = {token_id: token for token, token_id in vocabulary.items()}
        self.tokens |= {token_id: content for token_id, (content, _) in added.items()}
        self.special = SpecialTokens(self.tokens, added)
        self.byte_of: dict[int, int] = {}
        if byte_fallback:
            for token_id, token in self.tokens.items():
                if match := BYTE_TOKEN.fullmatch(token):
                    self.byte_of[token_id] = int(match[1], 16)


class TableDecoder:
    """Base of decoders that get the texts of ids from `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self.byte_of = table.byte_of

    def is_special(self, token: int) -> bool:
        return token in self._table.special.texts

    def is_unknown(self, token: int) -> bool:
        return token not in self._table.tokens

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids. LibraryPanic for those that `tokenizers` cannot decode."""
        with panics_as_errors():
            return self._tokenizer.decode(ids, skip_special_tokens=False)


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # Rust's from_str_radix accepts a sign, too


def decode_certain(data: bytes, errors: Literal["strict", "replace"]) -> tuple[str, bytes]:
    """Return the text that no further byte can change, and the bytes of an unfinished character."""
    text, used = codecs.utf_8_decode(data, errors, False)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":  # a surrogate, whose third byte Python would wait for
        return text + codecs.utf_8_decode(rest, errors, True)[0], b""
    return text, rest

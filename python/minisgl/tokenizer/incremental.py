"""Turns output ids into text, one token at a time.

The pieces of a stream and its flush together equal what `tokenizers` decodes from all ids at once, for any ids (or what
the ids add to the text before, if the stream continues one). Each character comes with the first token after which no
further token can change it.

Almost all decoders are of two kinds, which are in this module. Byte-level decoders (GPT-2, Llama 3, Qwen, DeepSeek) map
every token to bytes, which together are read as UTF-8. Others (Llama 2, Gemma, T5, BERT) map every token to text
independently, except that the first token may lose a space and that a run of byte tokens (<0xE4>) is one unit.
`redecoding.py` decodes all the rest, and `decoder_choice.py` chooses.
"""

from __future__ import annotations

import codecs
import re
from typing import Literal, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"

AddedTokens = dict[int, tuple[str, bool]]  # id: (content, True if it is special)


class TextStream(Protocol):
    """Decoding state of one sequence."""

    def feed(self, token: int) -> str:
        """Add a token; return the text that has become certain."""

    def flush(self) -> str:
        """Return the rest of the text, when no token follows."""


class TokenTexts(Protocol):
    """Texts of single tokens."""

    def token_bytes(self, token: int) -> bytes:
        """Return the token's text, if it is not the first, as UTF-8; it may be a part of a character."""

    def is_special(self, token: int) -> bool:
        """Return True if `skip_special_tokens` leaves the token out."""


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
        return self._tokenizer.decode(ids, skip_special_tokens=False)


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # Rust's from_str_radix accepts a sign, too


def _decode_certain(data: bytes, errors: Literal["strict", "replace"]) -> tuple[str, bytes]:
    """Return the text that no further byte can change, and the bytes of an unfinished character."""
    text, used = codecs.utf_8_decode(data, errors, False)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":  # a surrogate, whose third byte Python would wait for
        return text + codecs.utf_8_decode(rest, errors, True)[0], b""
    return text, rest


# --- byte-level decoders ---


def _byte_of_character() -> dict[int, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, U+0100 to U+0143 for the other 68 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


ALPHABET = _byte_of_character()  # character code: byte


class ByteLevelDecoder:
    """Maps a token to a string if it is whole characters, as almost all are, otherwise to bytes."""

    def __init__(self, vocabulary: dict[str, int], added: AddedTokens) -> None:
        tokens = {token_id: token for token, token_id in vocabulary.items()}
        tokens |= {token_id: content for token_id, (content, _) in added.items()}
        encode = codecs.charmap_encode
        table: list[str | bytes] = [""] * (1 + max(tokens, default=-1))  # an id without a token is no text
        for token_id, token in tokens.items():
            if token.isascii():  # ASCII stands for itself, in the alphabet or not
                table[token_id] = token
                continue
            try:
                data = encode(token, "strict", ALPHABET)[0]
            except UnicodeEncodeError:  # an added token, with a character that is not in the alphabet
                table[token_id] = token
                continue
            try:
                table[token_id] = data.decode()
            except UnicodeDecodeError:
                table[token_id] = data
        self._table = table
        self._special = SpecialTokens(tokens, added)

    def stream(
        self,
        skip_special_tokens: bool,
        keep: tuple[str, ...] = (),
        *,
        continues: bool = False,  # noqa: ARG002 - bytes are the same everywhere
    ) -> TextStream:
        return _ByteLevelStream(self._table, self._special.skipped(skip_special_tokens, keep))

    def token_bytes(self, token: int) -> bytes:
        piece = self._table[token] if token < len(self._table) else b""
        return piece.encode() if isinstance(piece, str) else piece

    def is_special(self, token: int) -> bool:
        return token in self._special.texts


class _ByteLevelStream:
    __slots__ = ("_incomplete", "_skipped", "_table")

    def __init__(self, table: list[str | bytes], skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._incomplete = b""  # first bytes of an unfinished character

    def feed(self, token: int) -> str:
        table = self._table
        if token in self._skipped or token >= len(table):
            return ""
        piece = table[token]
        if type(piece) is str and not self._incomplete:
            return piece
        data = self._incomplete + (piece.encode() if isinstance(piece, str) else piece)
        text, self._incomplete = _decode_certain(data, "replace")
        return text

    def flush(self) -> str:
        text = self._incomplete.decode(errors="replace")
        self._incomplete = b""
        return text


# --- decoders that map every token by itself ---


class TokenwiseDecoder(TableDecoder):
    """Gets the text of each token from `tokenizers` when the token first comes, as what it adds to an anchor.

    A token's text in the middle of a sequence does not depend on other tokens, so it is the part of
    decode([anchor, token]) after decode([anchor]), where the anchor is any token with text. A unit is a token or a run
    of byte tokens.
    """

    def __init__(self, tokenizer: Tokenizer, table: TokenTable, anchor: int) -> None:
        super().__init__(tokenizer, table)
        self._anchor, self._anchor_text = anchor, self.decode([anchor])
        self._texts: dict[int, str] = {}

    def stream(self, skip_special_tokens: bool, keep: tuple[str, ...] = (), *, continues: bool = False) -> TextStream:
        return _TokenwiseStream(self, self._table.special.skipped(skip_special_tokens, keep), continues)

    def token_bytes(self, token: int) -> bytes:
        if token in self.byte_of:
            return bytes([self.byte_of[token]])
        return b"" if self.is_unknown(token) else self.text_of([token]).encode()

    def text_of(self, unit: list[int]) -> str:
        """Return the text that the unit adds, if it is not the first."""
        if len(unit) > 1:
            return self._after_anchor(unit)
        text = self._texts.get(unit[0])
        if text is None:
            text = self._texts[unit[0]] = self._after_anchor(unit)
        return text

    def _after_anchor(self, unit: list[int]) -> str:
        return self.decode([self._anchor, *unit])[len(self._anchor_text) :]


class _TokenwiseStream:
    __slots__ = ("_broken", "_decoder", "_incomplete", "_run", "_skipped", "_start")

    def __init__(self, decoder: TokenwiseDecoder, skipped: frozenset[int], continues: bool) -> None:
        self._decoder = decoder
        self._skipped = skipped
        self._start: list[int] | None = None if continues else []  # tokens so far, until they have some text
        self._run: list[int] = []  # byte tokens, held back because one invalid byte turns all of them into U+FFFD
        self._incomplete = b""  # last bytes of the run that are an unfinished character
        self._broken = False  # the run has an invalid byte

    def feed(self, token: int) -> str:
        decoder = self._decoder
        if token in self._skipped or decoder.is_unknown(token):  # it does not end a run of byte tokens
            return ""
        byte = decoder.byte_of.get(token)
        if byte is None:
            return self.flush() + self._add([token])
        if self._broken:
            return REPLACEMENT
        self._run.append(token)
        try:
            _, self._incomplete = _decode_certain(self._incomplete + bytes([byte]), "strict")
        except UnicodeDecodeError:
            run, self._run = self._run, []
            self._broken = True
            return self._add(run)
        return ""

    def flush(self) -> str:
        """End the run of bytes."""
        run, self._run = self._run, []
        self._incomplete = b""
        self._broken = False
        return self._add(run) if run else ""

    def _add(self, unit: list[int]) -> str:
        """Return the text of one more unit. The first tokens are decoded together until they have text."""
        if self._start is None:
            return self._decoder.text_of(unit)
        tokens = self._start + unit
        text = self._decoder.decode(tokens)
        if text:
            self._start = None
        elif not self._start or self._decoder.text_of(unit):
            self._start = tokens
        return text

"""Streaming decoder of tokenizers that map every token to text by itself (Llama 2, Gemma, T5, BERT).

There are two exceptions: the first token may lose a space, and a run of byte tokens (<0xE4>) is one unit.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from minisgl.panics import LibraryPanic
from minisgl.tokenizer.decoders.base import REPLACEMENT, TableDecoder, TextStream, TokenTable, decode_certain


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
        if self.is_unknown(token):
            return b""
        try:
            return self.text_of([token]).encode()
        except LibraryPanic:
            return self._table.tokens[token].encode()

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
            _, self._incomplete = decode_certain(self._incomplete + bytes([byte]), "strict")
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

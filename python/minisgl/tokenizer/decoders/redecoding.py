"""Streaming decoder for any decoder of `tokenizers`: a window of the last tokens is decoded again for each new one.

New text at the end of the window is shown, except what a later token may still change: an unfinished character, a run
of byte tokens, and as many characters as the decoder's steps look ahead (`reach`). Old tokens leave the window only if
the text that is not shown yet, and one character before it, is the same without them: then the special treatment of a
first token no longer matters. So the cost of a token is bounded, and the text equals that of all ids decoded at once
unless something in it depends on more than MAX_WINDOW tokens.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from minisgl.panics import LibraryPanic
from minisgl.tokenizer.decoders.base import REPLACEMENT, TableDecoder, TextStream, TokenTable
from minisgl.tokenizer.decoders.byte_level import ALPHABET

WINDOW = 16  # tokens; it doubles while half of them are too few as context
MAX_WINDOW = 256  # tokens
MAX_ANCHOR = 12  # characters of a token that may be an anchor: a letter and its marks


class RedecodingDecoder(TableDecoder):
    """Decodes with `tokenizers` alone. `reach`: characters at the end of a text that a later token may change."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable, *, reach: int) -> None:
        super().__init__(tokenizer, table)
        self.reach = reach
        self._anchors = self._find_anchors()
        self._bytes: dict[int, bytes] = {}

    def _find_anchors(self) -> list[int]:
        """Return tokens that are one letter, the shortest token first: `a` before `a</w>`.

        A byte token (`<0x61>`) is none, because it would be one run with the byte tokens after it.
        """
        short = [
            token_id
            for token_id, token in self._table.tokens.items()
            if len(token) <= MAX_ANCHOR and token_id not in self.byte_of
        ]
        short.sort(key=lambda token_id: (len(self._table.tokens[token_id]), token_id))
        with_letter = [token_id for token_id in short if any(map(str.isalnum, self._table.tokens[token_id]))]
        texts = {token_id: self._text_alone(token_id).strip() for token_id in with_letter}
        letters = [token_id for token_id, text in texts.items() if len(text) == 1 and text.isalnum()]
        return letters or [token_id for token_id in short if self._text_alone(token_id).strip(REPLACEMENT)]

    def _text_alone(self, token: int) -> str:
        """Return the token's text; "" if it cannot be decoded."""
        try:
            return self.decode([token])
        except LibraryPanic:
            return ""

    def ends_before(self, token: int) -> int | None:
        """Return an anchor to put before this token, if any: the longest one, which may have a mark of a word's end.

        It differs from the token, because some decoders merge equal tokens.
        """
        return next((anchor for anchor in reversed(self._anchors) if anchor != token), None)

    def stream(self, skip_special_tokens: bool, keep: tuple[str, ...] = (), *, continues: bool = False) -> TextStream:
        return _RedecodingStream(self, self._table.special.skipped(skip_special_tokens, keep), continues)

    def token_bytes(self, token: int) -> bytes:
        """Return the text that the token adds between two others, as UTF-8; it may be a part of a character."""
        found = self._bytes.get(token)
        if found is None:
            try:
                found = b"" if self.is_unknown(token) else self._between_anchors(token)
            except LibraryPanic:
                found = self._table.tokens[token].encode()
            self._bytes[token] = found
        return found

    def _between_anchors(self, token: int) -> bytes:
        if token in self.byte_of:
            return bytes([self.byte_of[token]])
        text = self.decode([token])
        others = [anchor for anchor in self._anchors[:3] if anchor != token]
        if len(others) > 1:
            left, right = others[:2]
            front = self.decode([left])
            back = self.decode([left, right])[len(front) :]
            whole = self.decode([left, token, right])
            if whole.startswith(front) and whole.endswith(back) and len(front) + len(back) <= len(whole):
                text = whole[len(front) : len(whole) - len(back)]
        codes = [ord(character) for character in self._table.tokens[token]]
        if REPLACEMENT in text and all(code in ALPHABET for code in codes):
            return bytes(ALPHABET[code] for code in codes)
        return text.encode()


class _RedecodingStream:
    __slots__ = ("_decoder", "_limit", "_shown", "_skipped", "_starts_behind_anchor", "_window")

    def __init__(self, decoder: RedecodingDecoder, skipped: frozenset[int], continues: bool) -> None:
        self._decoder = decoder
        self._skipped = skipped
        self._starts_behind_anchor = continues
        self._window: list[int] = []
        self._shown = ""  # part of the window's text that was returned
        self._limit = WINDOW

    def feed(self, token: int) -> str:
        decoder = self._decoder
        if token in self._skipped or decoder.is_unknown(token):
            return ""
        if self._starts_behind_anchor:
            self._starts_behind_anchor = False
            anchor = decoder.ends_before(token)
            if anchor is not None:
                self._window = [anchor]
                self._shown = decoder.decode([anchor])
        self._window.append(token)
        if token in decoder.byte_of and len(self._window) < MAX_WINDOW:
            return ""  # one invalid byte changes the whole run
        text = self._decode_window()
        certain = len(text) - decoder.reach
        if decoder.reach == 0 and text.endswith(REPLACEMENT):
            certain -= 1
        new = self._show(text, certain)
        if len(self._window) >= self._limit:
            new += self._forget(text)
        return new

    def flush(self) -> str:
        text = self._decode_window()
        return self._show(text, len(text))

    def _decode_window(self) -> str:
        """Return the window's text, which begins with its shown part."""
        text = self._decoder.decode(self._window)
        if not text.startswith(self._shown):  # shown text cannot change: decode the last token alone
            self._window, self._shown = self._window[-1:], ""
            text = self._decoder.decode(self._window)
        return text

    def _show(self, text: str, certain: int) -> str:
        """Return the first `certain` characters of the text without those already shown."""
        new = text[len(self._shown) : max(certain, 0)]
        self._shown += new
        return new

    def _forget(self, text: str) -> str:
        """Drop the first half of the window if the rest suffices as context; return text that must be shown for it."""
        rest = self._window[len(self._window) // 2 :]
        rest_text = self._decoder.decode(rest)
        shown = len(self._shown)
        if shown and rest_text.endswith(text[shown - 1 :]):
            self._window, self._shown = rest, rest_text[: len(rest_text) - (len(text) - shown)]
            return ""
        if self._limit < MAX_WINDOW:
            self._limit *= 2
            return ""
        self._window, self._shown = rest, rest_text
        return text[shown:]

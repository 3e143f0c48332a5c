"""Streaming decoder of byte-level tokenizers (GPT-2, Llama 3, Qwen, DeepSeek), whose tokens together are UTF-8."""

from __future__ import annotations

import codecs

from minisgl.tokenizer.decoders.base import AddedTokens, SpecialTokens, TextStream, decode_certain


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
        text, self._incomplete = decode_certain(data, "replace")
        return text

    def flush(self) -> str:
        text = self._incomplete.decode(errors="replace")
        self._incomplete = b""
        return text

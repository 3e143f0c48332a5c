"""Chooses the streaming decoder of a tokenizer: a fast one if it is exact for this tokenizer, else the general one."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer, decoders

from minisgl.panics import LibraryPanic, panics_as_errors
from minisgl.tokenizer.decoders.base import BYTE_TOKEN, REPLACEMENT, TextDecoder, TokenTable
from minisgl.tokenizer.decoders.byte_level import ALPHABET, ByteLevelDecoder
from minisgl.tokenizer.decoders.redecoding import RedecodingDecoder
from minisgl.tokenizer.decoders.tokenwise import TokenwiseDecoder

LOOK_AHEAD = 64  # characters that an unknown step may look ahead, such as a regular expression


def make_decoder(tokenizer: Tokenizer) -> TextDecoder:
    """Return the streaming decoder for this tokenizer."""
    description = _description(tokenizer)
    if is_byte_level(description, tokenizer.get_vocab()):
        added = {token_id: (t.content, t.special) for token_id, t in tokenizer.get_added_tokens_decoder().items()}
        return ByteLevelDecoder(tokenizer.get_vocab(with_added_tokens=False), added)
    steps = _flatten(description)
    table = TokenTable(tokenizer, byte_fallback=any(step["type"] == "ByteFallback" for step in steps))
    anchor = _letter(tokenizer, table) if _is_tokenwise(steps) else None
    if anchor is not None:
        return TokenwiseDecoder(tokenizer, table, anchor)
    return RedecodingDecoder(tokenizer, table, reach=_reach(steps))


def make_plain(tokenizer: Tokenizer) -> None:
    """Remove the decoder's idle steps around ByteLevel, because llguidance would misread the tokenizer's kind."""
    description = _description(tokenizer)
    if len(_flatten(description)) > 1 and is_byte_level(description, tokenizer.get_vocab()):
        tokenizer.decoder = decoders.ByteLevel()


def _description(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the tokenizer's decoder as tokenizer.json writes it."""
    return None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())


def is_byte_level(description: dict[str, Any] | None, tokens: Collection[str]) -> bool:
    """Return True if the decoder with this description maps these tokens to bytes, and does nothing else.

    Steps before ByteLevel may be idle. Fuse counts as idle, with one difference: if a fused text has a character
    outside GPT-2's alphabet, `tokenizers` leaves all of it undecoded; here only that token is plain text.
    """
    steps = _flatten(description)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" not in kinds:
        return False
    before, after = steps[: kinds.index("ByteLevel")], kinds[kinds.index("ByteLevel") + 1 :]
    is_fused = "Fuse" in kinds[: len(before)]
    return all(kind == "Fuse" for kind in after) and all(_is_idle(step, tokens, is_fused) for step in before)


def _is_idle(step: dict[str, Any], tokens: Collection[str], is_fused: bool) -> bool:
    """Return True if a step changes none of these tokens or, if they are fused, no text of GPT-2's alphabet."""
    match step:
        case {"type": "Fuse"}:
            return True
        case {"type": "ByteFallback"}:
            return not any(BYTE_TOKEN.fullmatch(token) for token in tokens if token.startswith("<0x"))
        case {"type": "Replace", "pattern": {"String": str(pattern)}} if is_fused:
            return not ALPHABET.keys() >= set(map(ord, pattern))
        case {"type": "Replace", "pattern": {"String": str(pattern)}}:
            return not any(pattern in token for token in tokens)
    return False


def _flatten(description: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the decoder's steps, nested sequences flattened."""
    if description is None:
        return []
    if description["type"] != "Sequence":
        return [description]
    return [step for part in description["decoders"] for step in _flatten(part)]


def _is_tokenwise(steps: list[dict[str, Any]]) -> bool:
    """Return True if these steps map each token, or run of byte tokens, to text independently of its neighbours."""
    kinds = [step["type"] for step in steps]
    per_token = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    if "ByteFallback" in kinds and not all(map(_leaves_bytes, steps)):
        return False
    return all(kind in _PER_TOKEN for kind in kinds[:per_token]) and all(map(_is_incremental, steps[per_token:]))


_PER_TOKEN = ("Replace", "Metaspace", "WordPiece", "Strip", "ByteFallback")


def _leaves_bytes(step: dict[str, Any]) -> bool:
    """Return True if this step changes neither byte tokens nor the U+FFFD of invalid bytes."""
    match step:
        case {"type": "ByteFallback" | "Fuse" | "Metaspace"}:
            return True
        case {"type": "Replace", "pattern": {"String": str(pattern)}}:
            return len(pattern) == 1 and pattern not in "<0xABCDEFabcdef123456789+>" + REPLACEMENT
        case {"type": "Strip", "content": str(content)}:
            return content not in "<>" + REPLACEMENT
    return False


def _is_incremental(step: dict[str, Any]) -> bool:
    """Return True if this step, on the whole text after Fuse, looks at single characters or at the start only."""
    match step:
        case {"type": "Fuse"} | {"type": "Strip", "stop": 0}:
            return True
        case {"type": "Replace", "pattern": {"String": str(pattern)}}:
            return len(pattern) == 1
    return False


def _letter(tokenizer: Tokenizer, table: TokenTable) -> int | None:
    """Return the first token that is a single letter by itself."""
    for token_id in sorted(table.tokens):
        try:
            with panics_as_errors():
                text = tokenizer.decode([token_id], skip_special_tokens=False)
        except LibraryPanic:
            continue
        if len(text) == 1 and text.isalnum() and token_id not in table.byte_of:
            return token_id
    return None


def _reach(steps: list[dict[str, Any]]) -> int:
    """Return how many characters at the end of a text a later token may change, beside an unfinished character.

    Only the steps after tokens are joined (by Fuse or ByteLevel) can look ahead.
    """
    kinds = [step["type"] for step in steps]
    joined = next((at for at, kind in enumerate(kinds) if kind in ("Fuse", "ByteLevel")), len(kinds))
    after = [step for step in steps[joined:] if step["type"] != "Fuse"]
    reach = 0
    for at, step in enumerate(after):
        match step:
            case {"type": "ByteLevel"}:
                reach += at + 1 < len(after)  # the next step sees U+FFFD for an unfinished character
            case {"type": "Metaspace"}:
                pass
            case {"type": "Strip", "stop": int(stop)}:
                reach += stop
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                reach = (reach + max(len(pattern) - 1, 0)) * max(len(content), 1)
            case _:
                reach += LOOK_AHEAD
    return reach

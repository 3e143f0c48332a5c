"""Log-probabilities for readers: packed rows of ids and numbers to tokens with their text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from minisgl.message.types import LogprobRows, PositionLogprobs, TokenLogprob, unpack_ids


class Vocabulary(Protocol):
    """What readers learn of a token, as a `TextDecoder` knows it."""

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


def unpack_logprobs(
    rows: LogprobRows, vocabulary: Vocabulary, tops: Sequence[int] | None = None
) -> list[PositionLogprobs]:
    """One for each position, most likely alternatives first: all of them, or `tops[i]` at position i."""
    chosen = _tokens(unpack_ids(rows.tokens).tolist(), rows.logprobs, vocabulary)
    width = len(rows.top_tokens) // max(len(rows.tokens), 1)
    ranks: list[int] = unpack_ids(rows.ranks).tolist()
    top = _tokens(unpack_ids(rows.top_tokens).tolist(), rows.top_logprobs, vocabulary)
    widths = [width] * len(chosen) if tops is None else tops
    return [
        PositionLogprobs(token, rank, top[at * width : at * width + wanted], vocabulary.is_special(token.token))
        for at, (token, rank, wanted) in enumerate(zip(chosen, ranks, widths, strict=True))
    ]


def _tokens(ids: list[int], logprobs: bytes, vocabulary: Vocabulary) -> list[TokenLogprob]:
    values = np.frombuffer(logprobs, dtype="<f4").tolist()
    return [TokenLogprob(token, vocabulary.token_bytes(token), value) for token, value in zip(ids, values, strict=True)]

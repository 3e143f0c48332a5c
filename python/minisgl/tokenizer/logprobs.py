"""Log-probabilities for readers: packed rows of ids and numbers to tokens with their text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minisgl.message.types import LogprobRows, PositionLogprobs, TokenLogprob, unpack_ids


def unpack_logprobs(
    rows: LogprobRows, token_bytes: Callable[[int], bytes], tops: Sequence[int] | None = None
) -> list[PositionLogprobs]:
    """One for each position, most likely alternatives first: all of them, or `tops[i]` at position i."""
    chosen = _tokens(unpack_ids(rows.tokens).tolist(), rows.logprobs, token_bytes)
    width = len(rows.top_tokens) // max(len(rows.tokens), 1)
    ranks: list[int] = unpack_ids(rows.ranks).tolist()
    top = _tokens(unpack_ids(rows.top_tokens).tolist(), rows.top_logprobs, token_bytes)
    widths = [width] * len(chosen) if tops is None else tops
    return [
        PositionLogprobs(token, rank, top[at * width : at * width + wanted])
        for at, (token, rank, wanted) in enumerate(zip(chosen, ranks, widths, strict=True))
    ]


def _tokens(ids: list[int], logprobs: bytes, token_bytes: Callable[[int], bytes]) -> list[TokenLogprob]:
    values = np.frombuffer(logprobs, dtype="<f4").tolist()
    return [TokenLogprob(token, token_bytes(token), value) for token, value in zip(ids, values, strict=True)]

"""Log-probabilities for readers: packed rows of ids and numbers to tokens with their text. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minisgl.message.types import LogprobRows, PositionLogprobs, TokenLogprob, unpack_ids


def unpack_logprobs(rows: LogprobRows, token_bytes: Callable[[int], bytes]) -> list[PositionLogprobs]:
    """One for each position, most likely alternatives first."""
    tokens: list[int] = unpack_ids(rows.tokens).tolist()
    chosen = _tokens(tokens, rows.logprobs, token_bytes)
    top = _tokens(unpack_ids(rows.top_tokens).tolist(), rows.top_logprobs, token_bytes)
    width = len(top) // max(len(tokens), 1)
    return [
        PositionLogprobs(token, rank, top[at * width : (at + 1) * width])
        for at, (token, rank) in enumerate(zip(chosen, unpack_ids(rows.ranks).tolist(), strict=True))
    ]


def _tokens(ids: list[int], logprobs: bytes, token_bytes: Callable[[int], bytes]) -> list[TokenLogprob]:
    values = np.frombuffer(logprobs, dtype="<f4").tolist()
    return [TokenLogprob(token, token_bytes(token), value) for token, value in zip(ids, values, strict=True)]

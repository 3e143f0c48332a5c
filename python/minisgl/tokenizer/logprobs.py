"""Log-probabilities for readers: packed rows of ids and numbers to tokens with their text. Pure."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

import numpy as np

from minisgl.message.types import LogprobRows, PackedIds, PositionLogprobs, TokenLogprob, unpack_ids


class Vocabulary(Protocol):
    """Knowledge of tokens that readers need; a `TextDecoder` has it."""

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


def unpack_logprobs(rows: LogprobRows, vocabulary: Vocabulary) -> dict[int, list[PositionLogprobs]]:
    """Return the positions of each sequence, in order, with the most likely alternatives first."""
    chosen = _tokens(rows.tokens, rows.logprobs, vocabulary)
    top = _tokens(rows.top_tokens, rows.top_logprobs, vocabulary)
    ranked = zip(chosen, unpack_ids(rows.ranks).tolist(), strict=True)
    found: dict[int, list[PositionLogprobs]] = {}
    at = 0
    for seq_id, length, width in zip(rows.seq_ids, rows.lengths, rows.tops, strict=True):
        positions = found.setdefault(seq_id, [])
        for token, rank in islice(ranked, length):
            special = vocabulary.is_special(token.token)
            positions.append(PositionLogprobs(token, rank, top[at : at + width], special))
            at += width
    return found


def _tokens(packed: PackedIds, logprobs: bytes, vocabulary: Vocabulary) -> list[TokenLogprob]:
    ids: list[int] = unpack_ids(packed).tolist()
    values = np.frombuffer(logprobs, dtype="<f4").tolist()
    return [TokenLogprob(token, vocabulary.token_bytes(token), value) for token, value in zip(ids, values, strict=True)]

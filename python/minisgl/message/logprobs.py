"""Log-probabilities on the wire: packed, until a receiver needs objects.

An alternative takes 120 bytes as an object, 20 in `PackedPositions` and 8 in `PackedLogprobs`. Only a few positions are
objects at a time: millions take a second to make, to decode in one call or to free, during which an event loop waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from minisgl.message.packed_ids import ID_BYTES, PackedIds, unpack_ids


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token at a position, or an alternative to it."""

    token: int
    text: bytes  # its UTF-8 bytes, which may be a part of a character
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Token at a position, and the most likely alternatives."""

    chosen: TokenLogprob
    rank: int  # rank of the chosen token: 1 is the most likely
    top: list[TokenLogprob]
    special: bool = False  # the chosen token is one that `skip_special_tokens` leaves out of the text


class LogprobRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at n positions with m alternatives in all, packed sequence by sequence."""

    seq_ids: list[int]
    lengths: list[int]  # number of positions of each sequence
    tops: list[int]  # number of alternatives at each position of a sequence
    tokens: PackedIds  # [n]
    logprobs: bytes  # [n] float32
    ranks: PackedIds  # [n]
    top_tokens: PackedIds  # [m], most likely first at each position
    top_logprobs: bytes  # [m] float32


PackedPositions: TypeAlias = bytes  # msgpack: list[PositionLogprobs], or nothing
POSITIONS_A_SLICE = 256
_POSITIONS = msgspec.msgpack.Decoder(list[PositionLogprobs])


def pack_positions(positions: list[PositionLogprobs]) -> PackedPositions:
    return msgspec.msgpack.encode(positions)


def unpack_positions(parts: Iterable[PackedPositions]) -> Iterator[PositionLogprobs]:
    """Yield the positions of all parts, one part after the other."""
    for part in parts:
        if part:
            yield from _POSITIONS.decode(part)


class TokenTexts(Protocol):
    """Texts of single tokens."""

    def token_bytes(self, token: int) -> bytes:
        """Return the token's text, if it is not the first, as UTF-8; it may be a part of a character."""

    def is_special(self, token: int) -> bool:
        """Return True if `skip_special_tokens` leaves the token out."""


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one sequence in arrays, with the text of each token that they name."""

    rows: LogprobRows
    texts: dict[int, bytes]
    special: frozenset[int]  # the special ones of these tokens

    @classmethod
    def pack(cls, rows: LogprobRows, vocabulary: TokenTexts) -> PackedLogprobs:
        tokens = _distinct(rows.tokens + rows.top_tokens)
        texts = {token: vocabulary.token_bytes(token) for token in tokens}
        return cls(rows, texts, frozenset(filter(vocabulary.is_special, tokens)))

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token]

    def is_special(self, token: int) -> bool:
        return token in self.special

    def __len__(self) -> int:
        """Return the number of positions."""
        return self.rows.lengths[0]

    def __iter__(self) -> Iterator[PositionLogprobs]:
        """Yield the positions, few of which are objects at a time."""
        for start in range(0, len(self), POSITIONS_A_SLICE):
            rows = _slice(self.rows, start, min(start + POSITIONS_A_SLICE, len(self)))
            yield from unpack_logprobs(rows, self)[rows.seq_ids[0]]


def unpack_logprobs(rows: LogprobRows, vocabulary: TokenTexts) -> dict[int, list[PositionLogprobs]]:
    """Return the positions of each sequence, in order, with alternatives from the most likely on."""
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


def _tokens(packed: PackedIds, logprobs: bytes, vocabulary: TokenTexts) -> list[TokenLogprob]:
    ids: list[int] = unpack_ids(packed).tolist()
    values = np.frombuffer(logprobs, dtype="<f4").tolist()
    return [TokenLogprob(token, vocabulary.token_bytes(token), value) for token, value in zip(ids, values, strict=True)]


def _slice(rows: LogprobRows, start: int, end: int) -> LogprobRows:
    """Return positions `start` to `end` of the only sequence of `rows`. Ids and values have 4 bytes each."""
    width = rows.tops[0]
    each = slice(start * ID_BYTES, end * ID_BYTES)
    top = slice(start * width * ID_BYTES, end * width * ID_BYTES)
    return LogprobRows(
        seq_ids=rows.seq_ids,
        lengths=[end - start],
        tops=rows.tops,
        tokens=rows.tokens[each],
        logprobs=rows.logprobs[each],
        ranks=rows.ranks[each],
        top_tokens=rows.top_tokens[top],
        top_logprobs=rows.top_logprobs[top],
    )


def _distinct(packed: PackedIds) -> list[int]:
    """Return each id once, in time that grows with their number and the vocabulary, without sorting them."""
    ids = unpack_ids(packed)
    found = np.zeros(ids.max(initial=-1) + 1, dtype=np.bool_)
    found[ids] = True
    return np.flatnonzero(found).tolist()

"""Parts of messages that several receivers share, and messages that several processes pass on."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

from minisgl.core import Int32Array

PackedIds: TypeAlias = bytes  # little-endian int32
ID_BYTES = 4
ConversationMessage: TypeAlias = dict[str, Any]  # in a form of OpenAI, or as chat templates read it


def pack_ids(ids: Int32Array | list[int]) -> PackedIds:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: PackedIds) -> Int32Array:
    return np.frombuffer(packed, dtype="<i4")


def num_ids(packed: PackedIds) -> int:
    return len(packed) // ID_BYTES


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


class TextOptions(msgspec.Struct, frozen=True):
    """Options for turning the output ids of a sequence into text, and texts that end it."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop: bool = False  # the stop string or token that ends the text is a part of it
    keep: tuple[str, ...] = ()  # special tokens that are not skipped
    continues: bool = False  # the text continues the prompt's, so a space at its start is kept


class ProcessCounts(msgspec.Struct, frozen=True):
    """Counts of one process at this moment, by name, for /server_info."""

    process: str
    counts: dict[str, int]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: end these sequences.

    The client closed its connection or asked for it. Sequences that have already ended are ignored.
    """

    seq_ids: list[int]


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: remove every cached prefix that no sequence uses."""

    query_id: int


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> detokenizer -> API server: answer to FlushCache, with the number of freed pages."""

    query_id: int
    pages: int


class StatsRequest(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: collect counts; each process adds its own."""

    query_id: int
    counts: list[ProcessCounts] = []


class StatsReport(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> detokenizer -> API server: answer to StatsRequest, with the counts of all these processes."""

    query_id: int
    counts: list[ProcessCounts]

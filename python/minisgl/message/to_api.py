"""Tokenizer workers and detokenizer -> API server."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import FinishReason
from minisgl.message.types import PackedIds, ProcessCounts


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The prompt of these sequences is tokenized, valid and on its way to the scheduler."""

    sequences: list[int]
    prompt_ids: PackedIds


class Refused(msgspec.Struct, frozen=True, tag=True):
    """These sequences will not run: the prompt is invalid. Nothing else comes for them."""

    sequences: list[int]
    field: str
    message: str


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one sequence got in a step. Ids are sent even while their text is held back."""

    sequence: int
    ids: PackedIds
    text: str
    finish: FinishReason | None = None  # set in exactly one piece, the last
    cached_tokens: int = 0  # in the last piece
    stop_reason: str | int | None = None  # in the last piece: the stop string or stop token that ended it


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """All that a step brought."""

    pieces: list[Piece]


class Report(msgspec.Struct, frozen=True, tag=True):
    """The counts of every process on the way of a Query."""

    query: int
    counts: list[ProcessCounts]


ToApi: TypeAlias = Accepted | Refused | Pieces | Report

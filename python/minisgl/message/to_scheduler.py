"""Tokenizer workers and detokenizer -> scheduler of rank 0."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import SamplingParams
from minisgl.message.relayed import Abort, FlushCache, StatsRequest
from minisgl.message.types import PackedIds, TextOptions


class Add(msgspec.Struct, frozen=True, tag=True):
    """A validated sequence to generate; `sampling.max_tokens` is resolved and fits the context."""

    seq_id: int
    prompt_ids: PackedIds
    sampling: SamplingParams
    seed: int
    text: TextOptions
    priority: int = 0  # larger goes first
    cache_salt: bytes = b""  # prefixes are shared between requests of the same salt only; of one length, or none


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer found a stop string in this sequence's text."""

    seq_id: int


ToScheduler: TypeAlias = Add | Abort | Stopped | StatsRequest | FlushCache

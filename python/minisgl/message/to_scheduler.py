"""Messages of tokenizer workers and detokenizer to the scheduler of rank 0, and of that to the other ranks."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import Batch, Int32Array
from minisgl.message.engine_state import StateRequest
from minisgl.message.packed_ids import PackedIds
from minisgl.message.shared import Abort, FlushCache, StatsRequest, TextOptions
from minisgl.sampling_params import SamplingParams


class Add(msgspec.Struct, frozen=True, tag=True):
    """A validated sequence to generate; `sampling.max_tokens` is resolved and fits the context."""

    seq_id: int
    prompt_ids: PackedIds
    sampling: SamplingParams
    seed: int
    text: TextOptions
    priority: int = 0  # larger goes first
    cache_salt: bytes = b""  # prefixes are shared only between requests with the same salt; all salts have one length
    request_id: str = ""  # for logs


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer found a stop string in this sequence's text."""

    seq_id: int


ToScheduler: TypeAlias = Add | Abort | Stopped | StatsRequest | FlushCache | StateRequest


class Bitmask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tokens that the sampling rows of the preceding plan may choose."""

    words: Int32Array  # [rows, ceil(vocab_size / 32)]


ToRank: TypeAlias = Batch | Bitmask  # a plan that is `constrained` is followed by its grammar bitmask

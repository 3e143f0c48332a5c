"""Messages of the scheduler of rank 0 to the detokenizer, one for each step."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import ErrorCause, FinishReason
from minisgl.message.engine_state import StateReport
from minisgl.message.logprobs import LogprobRows
from minisgl.message.packed_ids import PackedIds
from minisgl.message.shared import Flushed, StatsReport, TextOptions


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A sequence begins: exactly one Open comes before its tokens and exactly one End after them."""

    seq_id: int
    text: TextOptions
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    min_tokens: int = 0  # stop strings that end within the first `min_tokens` tokens are ignored
    admitted: float | None = None  # time of its admission by `perf_counter`, one clock for all processes of a host


class End(msgspec.Struct, frozen=True, array_like=True):
    """A sequence has ended, for any reason; no token of it follows."""

    seq_id: int
    reason: FinishReason
    stop_token: int | None = None  # token that ended it or broke its grammar, which is not part of the text
    cause: ErrorCause | None = None  # of an error, if it is one of these


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Vector of a whole prompt; the sequence's End comes in the same step."""

    seq_id: int
    vector: bytes  # little-endian float32


class StepOutput(msgspec.Struct, tag=True):
    """Outcome of a step, applied in this order: opened, tokens, ended. The scheduler fills it while it plans."""

    opened: list[Open] = []
    seq_ids: list[int] = []  # sequences that got a token
    tokens: PackedIds = b""  # one token of each of these sequences
    ended: list[End] = []
    logprobs: LogprobRows | None = None  # of the tokens of sequences that request them
    prompt_logprobs: list[LogprobRows] = []  # each of one whole prompt without its first token
    pooled: list[Pooled] = []  # results of a pooling model, instead of tokens

    def __bool__(self) -> bool:
        return bool(self.opened or self.seq_ids or self.ended)


ToDetokenizer: TypeAlias = StepOutput | StatsReport | Flushed | StateReport

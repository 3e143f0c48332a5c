"""Scheduler of rank 0 -> detokenizer: one message a step."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import FinishReason
from minisgl.message.engine_state import StateReport
from minisgl.message.types import Flushed, LogprobRows, PackedIds, Report, TextOptions


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A sequence begins: exactly one Open comes before its tokens and exactly one End after them."""

    seq_id: int
    text: TextOptions
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    min_tokens: int = 0  # no stop string ends the text before so many tokens
    admitted: float | None = None  # time of its admission by `perf_counter`, one clock for all processes of a host


class End(msgspec.Struct, frozen=True, array_like=True):
    """A sequence has ended, whoever ended it; no token of it follows."""

    seq_id: int
    reason: FinishReason
    stop_token: int | None = None  # the token that ended it: not part of the text
    excluded: bool = False  # an error: its `allowed_token_ids` left nothing that its grammar allows


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Vector of a whole prompt, of which an End in the same step is all that follows."""

    seq_id: int
    vector: bytes  # little-endian float32


class StepOutput(msgspec.Struct, tag=True):
    """Outcome of a step, applied in this order: opened, tokens, ended. The scheduler fills it while it plans."""

    opened: list[Open] = []
    seq_ids: list[int] = []  # sequences that got a token
    tokens: PackedIds = b""  # one each
    ended: list[End] = []
    logprobs: LogprobRows | None = None  # for the tokens of sequences that ask for them
    prompt_logprobs: list[LogprobRows] = []  # for whole prompts but their first tokens
    pooled: list[Pooled] = []  # results of a pooling model, instead of tokens

    def __bool__(self) -> bool:
        return bool(self.opened or self.seq_ids or self.ended)


ToDetokenizer: TypeAlias = StepOutput | Report | Flushed | StateReport

"""State of the engine for the glass box: requests, cached prefixes and the last steps, bounded in number."""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.core import CacheNode


class Chunk(msgspec.Struct, frozen=True):
    """Part of a prompt that one step computed."""

    seq_id: int
    start: int  # position of its first token
    tokens: int


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Completed step, or several successive ones that decoded the same sequences. Times are `perf_counter` seconds."""

    step: int  # number of the last step
    count: int = 1
    begin: float
    end: float
    decodes: int  # rows that decode, in each step
    prefill_tokens: int = 0
    decoding: list[int] = []  # seq_ids of the first decodes
    chunks: list[Chunk] = []  # first chunks of prompts


class SequenceState(msgspec.Struct, frozen=True, kw_only=True):
    """Running or waiting sequence. Lengths are tokens."""

    seq_id: int
    request_id: str  # id of the HTTP request
    state: Literal["waiting", "running", "retracted"]
    prompt: int
    hit: int = 0  # prompt tokens found in the prefix cache
    computed: int = 0  # tokens whose K and V are written or being written
    known: int  # prompt and output tokens so far
    limit: int  # number of tokens at which it must stop
    priority: int = 0
    node: int | None = None  # last page of the cached prefix that it holds


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the scheduler at one moment."""

    time: float  # seconds of `perf_counter`, one clock for all processes of a host
    counts: dict[str, int]  # counts of /server_info
    sequences: list[SequenceState]  # running ones, oldest first, then waiting ones in the queue's order
    nodes: list[CacheNode]  # largest nodes of the radix tree, parents first
    steps: list[StepRecord]  # steps that ended after the `since` of the question, oldest first


class StateRequest(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: report the state, and record steps for a while."""

    query_id: int
    since: int  # last step that the asker knows


class StateReport(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> detokenizer -> API server: answer to StateRequest."""

    query_id: int
    state: EngineState

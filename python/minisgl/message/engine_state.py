"""State of the engine for whoever looks at it: requests, cached prefixes and the last steps, bounded in number."""

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
    """A completed step, or several in a row that decoded the same sequences. Times are seconds of `perf_counter`."""

    step: int  # number of the last
    count: int = 1
    begin: float
    end: float
    decodes: int  # rows that decode, in each
    prefill_tokens: int = 0
    decoding: list[int] = []  # the first of their seq_ids
    chunks: list[Chunk] = []  # the first of the prompts' chunks


class SequenceState(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that runs or waits. Lengths are tokens."""

    seq_id: int
    request_id: str  # id of the HTTP request
    state: Literal["waiting", "running", "retracted"]
    prompt: int
    hit: int = 0  # found in the prefix cache when it entered
    computed: int = 0  # tokens whose K and V are written or being written
    known: int  # prompt and output so far
    limit: int  # at which it must stop
    priority: int = 0
    node: int | None = None  # last page of the cached prefix that it holds


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the scheduler."""

    time: float  # seconds of `perf_counter`, one clock for all processes of a host
    counts: dict[str, int]  # counts of /server_info
    sequences: list[SequenceState]  # the oldest running ones, then those that wait, in their order
    nodes: list[CacheNode]  # parents first, of the tree's nodes the largest
    steps: list[StepRecord]  # steps that ended since the step asked for, oldest first


class InspectState(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: tell the state, and record steps for a while."""

    query_id: int
    since: int  # the last step that is known


class StateReport(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> detokenizer -> API server: the answer."""

    query_id: int
    state: EngineState

"""Messages of several hops: those between pass them on."""

from __future__ import annotations

import msgspec

from minisgl.message.types import ProcessCounts


class Abort(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: end these sequences.

    The client left, gave up, or asked for it. Sequences that have ended already are passed over.
    """

    seq_ids: list[int]


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: forget every cached prefix that nobody uses."""

    query: int


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> detokenizer -> API server, to FlushCache: the pages that it freed."""

    query: int
    pages: int


class StatsRequest(msgspec.Struct, frozen=True, tag=True):
    """API server -> tokenizer worker -> scheduler: collect the counts of all on the way, who each add theirs."""

    query: int
    counts: list[ProcessCounts] = []


class Report(msgspec.Struct, frozen=True, tag=True):
    """Scheduler -> detokenizer -> API server, to StatsRequest: the counts of the processes on the way."""

    query: int
    counts: list[ProcessCounts]

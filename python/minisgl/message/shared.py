"""Messages that several processes pass on, and parts of messages that several receivers share."""

from __future__ import annotations

import msgspec


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

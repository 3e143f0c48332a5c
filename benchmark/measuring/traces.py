"""Traces of real services: when requests came, how long they were, and which prefixes they shared. No text in them.

Two formats are read: Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for
each block of 512 prompt tokens: equal ids are equal blocks), and the CSV of Azure's LLM inference traces (`TIMESTAMP`,
`ContextTokens`, `GeneratedTokens`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np

from measuring.workload import TimedRequest, fit_context
from minisgl.core import Int32Array

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    at: float  # seconds after the first
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks; none: it shares nothing


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Return the first `limit` requests, in order of their times. ValueError when the format is neither."""
    with path.open(encoding="utf-8", newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        if first.lstrip().startswith("{"):
            return parse_mooncake(islice(lines, limit))
        if first.startswith("TIMESTAMP,"):
            return parse_azure(islice(lines, None if limit is None else limit + 1))
    raise ValueError(f"{path.name} is neither Mooncake's JSON lines nor an Azure CSV: it begins with {first[:60]!r}")


def parse_mooncake(lines: Iterable[str]) -> list[TraceRow]:
    rows = []
    for line in lines:
        if line.strip():
            row = json.loads(line)
            at = row["timestamp"] / 1e3
            rows.append(TraceRow(at, row["input_length"], row["output_length"], tuple(row.get("hash_ids", ()))))
    return _from_zero(rows)


def parse_azure(lines: Iterable[str]) -> list[TraceRow]:
    rows = []
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        rows.append(TraceRow(at, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    return _from_zero(rows)


def _from_zero(rows: list[TraceRow]) -> list[TraceRow]:
    rows.sort(key=lambda row: row.at)
    return [TraceRow(row.at - rows[0].at, row.input_tokens, row.output_tokens, row.blocks) for row in rows]


def replay(
    rows: Sequence[TraceRow], *, speed: float, seed: int, vocab_size: int, context: int
) -> tuple[list[TimedRequest], int]:
    """Return the load that a trace is at `speed` times its pace, and how many requests had to be cut to the context.

    Prompts are random tokens; a block's tokens follow from its id and the seed alone.
    """
    load, num_cut = [], 0
    for index, row in enumerate(rows):
        wanted = max(1, row.input_tokens), max(1, row.output_tokens)
        num_input, num_output = fit_context(*wanted, context)
        num_cut += (num_input, num_output) != wanted
        prompt = _prompt(row.blocks, num_input, index, seed, vocab_size)
        load.append(TimedRequest(row.at / speed, prompt, num_output))
    return load, num_cut


def _prompt(blocks: Sequence[int], num_tokens: int, index: int, seed: int, vocab_size: int) -> Int32Array:
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    shared = [np.random.default_rng([seed, 0, block]) for block in blocks[:num_blocks]]
    # Tokens that no block covers belong to this request alone.
    own = [np.random.default_rng([seed, 1, index, place]) for place in range(len(shared), num_blocks)]
    parts = [rng.integers(0, vocab_size, BLOCK_TOKENS, dtype=np.int32) for rng in [*shared, *own]]
    return np.concatenate(parts)[:num_tokens]

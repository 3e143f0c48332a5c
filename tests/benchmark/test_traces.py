"""Traces: both formats, their times, and the prefixes that requests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from measuring.traces import BLOCK_TOKENS, TraceRow, parse_mooncake, read_trace, replay

MOONCAKE = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 4000, "input_length": 1300, "output_length": 6, "hash_ids": [7, 8, 10]}
{"timestamp": 4000, "input_length": 600, "output_length": 7, "hash_ids": [11, 8]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9310900,396,109
"""


def test_mooncake_traces_are_read(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    rows = read_trace(file)
    assert [row.at for row in rows] == [0.0, 3.0, 3.0]
    assert rows[1] == TraceRow(3.0, 1300, 6, (7, 8, 10))
    assert len(read_trace(file, 2)) == 2


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_azure_traces_are_read(tmp_path: Path, newline: str):
    file = tmp_path / "trace.csv"
    file.write_text(AZURE, newline=newline)
    rows = read_trace(file)
    assert [row.at for row in rows] == pytest.approx([0.0, 4.2505], abs=1e-5)
    assert (rows[1].input_tokens, rows[1].output_tokens, rows[1].blocks) == (396, 109, ())
    assert len(read_trace(file, 1)) == 1


def test_another_format_is_refused(tmp_path: Path):
    file = tmp_path / "trace.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="neither"):
        read_trace(file)


def test_equal_blocks_are_equal_tokens():
    rows = parse_mooncake(MOONCAKE.splitlines())
    load, num_cut = replay(rows, speed=1.0, seed=3, vocab_size=50000, context=10000)
    a, b, c = (request.prompt for request in load)
    assert num_cut == 0
    assert [len(prompt) for prompt in (a, b, c)] == [1100, 1300, 600]
    shared = 2 * BLOCK_TOKENS
    assert np.array_equal(a[:shared], b[:shared])
    assert not np.array_equal(a[shared:1100], b[shared:1100])
    assert np.array_equal(c[BLOCK_TOKENS:], a[BLOCK_TOKENS:600])  # a block's tokens follow from its id
    again, _ = replay(rows, speed=1.0, seed=3, vocab_size=50000, context=10000)
    assert all(np.array_equal(one.prompt, other.prompt) for one, other in zip(load, again, strict=True))
    other, _ = replay(rows, speed=1.0, seed=4, vocab_size=50000, context=10000)
    assert not np.array_equal(load[0].prompt[:BLOCK_TOKENS], other[0].prompt[:BLOCK_TOKENS])


def test_speed_and_context():
    rows = parse_mooncake(MOONCAKE.splitlines())
    load, num_cut = replay(rows, speed=2.0, seed=0, vocab_size=100, context=1000)
    assert [request.at for request in load] == [0.0, 1.5, 1.5]
    assert num_cut == 2
    assert all(len(request.prompt) + request.max_tokens <= 1000 for request in load)


def test_requests_without_blocks_share_nothing():
    rows = [TraceRow(0.0, 600, 1), TraceRow(0.0, 600, 1)]
    (a, b), _ = replay(rows, speed=1.0, seed=0, vocab_size=1000, context=1000)
    assert not np.array_equal(a.prompt[:10], b.prompt[:10])

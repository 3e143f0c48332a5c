"""Steps are recorded while a page is open: the records hold all work and are bounded."""

from __future__ import annotations

import numpy as np

from minisgl.core import Batch
from minisgl.scheduler.steps.trace import MAX_RECORDS, MAX_ROWS, MERGED_SECONDS, StepTrace
from scheduler.simulation import World


def plan(step: int, *query_lens: int, samples: bool = True) -> Batch:
    rows = np.arange(len(query_lens), dtype=np.int32)
    needs_sample = np.full(len(rows), samples)
    return Batch(step, rows, rows, np.array(query_lens, np.int32), needs_sample, np.zeros((0, 3), np.int32))


def test_records_hold_every_token_of_a_run() -> None:
    world = World(chunk=16, batch_policy="mixed")
    trace = world.loop.trace = StepTrace()
    shared = list(range(3, 23))
    for seq_id in range(6):
        world.add(seq_id, [*shared, 30 + seq_id, 40], max_tokens=5, ignore_eos=True)
    while world.loop.has_work:
        world.step()
    records = trace.since(-1)
    assert sum(record.count for record in records) == records[-1].step + 1 == world.loop.counts.finished
    assert sum(record.prefill_tokens for record in records) == 6 * 22 - sum(world.cached.values())
    assert sum(record.decodes * record.count for record in records) == 6 * 4, "a prompt's last chunk brings the first"
    of_first = [chunk for record in records for chunk in record.chunks if chunk.seq_id == 0]
    assert [(chunk.start, chunk.tokens) for chunk in of_first] == [(0, 16), (16, 6)]
    assert world.cached[5] == 20


def test_steps_are_recorded_only_on_request() -> None:
    assert World().loop.trace is None


def test_decodes_of_the_same_rows_are_one_record() -> None:
    trace = StepTrace()
    for step in range(100):
        trace.add(plan(step, 1, 1), [7, 8], step / 1000, (step + 1) / 1000)
    records = trace.since(-1)
    assert len(records) < 100 / (MERGED_SECONDS * 1000) + 2
    assert all(record.end - record.begin <= MERGED_SECONDS for record in records)
    assert sum(record.count for record in records) == 100
    trace.add(plan(100, 1), [7], 0.1, 0.101)
    trace.add(plan(101, 5, samples=False), [9], 0.101, 0.102)
    trace.add(plan(102, 1, samples=False), [9], 0.102, 0.103)  # a chunk of one token
    one, chunk, last = trace.since(99)
    assert (one.decoding, chunk.prefill_tokens, last.decodes, last.prefill_tokens) == ([7], 5, 0, 1)


def test_a_record_that_has_grown_comes_again() -> None:
    trace = StepTrace()
    trace.add(plan(0, 1), [7], 0.0, 0.001)
    (before,) = trace.since(-1)
    trace.add(plan(1, 1), [7], 0.001, 0.002)
    (after,) = trace.since(before.step)
    assert (after.begin, after.count, after.step) == (before.begin, 2, 1)


def test_records_are_bounded() -> None:
    trace = StepTrace()
    rows = 3 * MAX_ROWS
    for step in range(MAX_RECORDS + 10):
        trace.add(plan(step, *([1] * rows if step % 2 else [2] * rows)), list(range(rows)), step, step + 1)
    records = trace.since(-1)
    assert len(records) == MAX_RECORDS
    assert records[-1].decodes == rows
    assert max(len(record.decoding) + len(record.chunks) for record in records) == MAX_ROWS

"""The figures that records become."""

from __future__ import annotations

from array import array

import pytest

from measuring.client import RequestRecord
from measuring.statistics import Slo, full_time, spread, summarize, summarize_closed_loop, summarize_window

SLO = Slo(ttft_ms=600, ttft_ms_per_1k=0, tpot_ms=100)


def record(due: float, times: list[float], *, tokens: int | None = None, **changes: object) -> RequestRecord:
    made = RequestRecord(0, due, prompt_tokens=10, max_tokens=len(times), sent=due + 0.001)
    made.times, made.sizes = array("d", times), array("i", [1] * len(times))
    made.completion_tokens = len(times) if tokens is None else tokens
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_percentiles_lie_between_values():
    values = spread([float(value) for value in range(101)])
    assert values is not None
    assert (values.mean, values.p50, values.p90, values.p99, values.count) == (50, 50, 90, 99, 101)


def test_nothing_has_no_spread():
    assert spread([]) is None


def test_latencies_count_from_when_a_request_was_due():
    late = record(1.0, [1.5, 1.6], sent=1.4)
    assert late.ttft == pytest.approx(0.5)
    assert late.end_to_end == pytest.approx(0.6)


def test_a_request_sent_early_counts_from_then():
    assert record(1.0, [1.5], sent=0.999).ttft == pytest.approx(0.501)


def test_time_per_token_counts_tokens_and_not_events():
    assert record(0.0, [1.0, 2.0], tokens=5).time_per_token == pytest.approx(0.25)
    assert record(0.0, [1.0]).time_per_token is None


def test_the_first_token_may_take_longer_after_a_long_prompt():
    slo = Slo(ttft_ms=100, ttft_ms_per_1k=200, tpot_ms=100)
    assert slo.ttft_limit_ms(2500) == pytest.approx(600)
    assert slo.met_by(record(0.0, [0.59], prompt_tokens=2500))
    assert not slo.met_by(record(0.0, [0.59], prompt_tokens=2000))
    assert not slo.met_by(record(0.0, [0.5, 0.7], prompt_tokens=2500))


def test_a_request_is_lost_when_nothing_that_comes_can_help():
    waiting = record(1.0, [], max_tokens=3)
    assert not SLO.lost_by(waiting, 1.5)
    assert SLO.lost_by(waiting, 1.61)
    assert SLO.lost_by(record(1.0, [1.7], max_tokens=3), 1.7)  # first token too late
    answered = record(1.0, [1.5, 1.6], max_tokens=3)
    assert not SLO.lost_by(answered, 1.69)
    assert SLO.lost_by(answered, 1.71)  # the last of three tokens 0.2 s after the first at the latest
    assert not SLO.lost_by(record(1.0, [1.5]), 9.0)  # all tokens are there


def test_summary_of_a_load():
    records = [
        record(0.0, [0.5, 0.55, 0.6], cached_tokens=5),
        record(1.0, [1.7, 1.8]),  # first token too late
        record(1.0, [1.5, 2.0]),  # tokens too far apart
        record(1.0, [], error="refused"),
    ]
    summary = summarize(records, SLO)
    assert (summary.requests, summary.errors) == (4, 1)
    assert summary.seconds == pytest.approx(2.0)
    assert summary.requests_per_second == pytest.approx(1.5)
    assert summary.output_tokens_per_second == pytest.approx(3.5)
    assert summary.prompt_tokens_per_second == pytest.approx(15)
    assert summary.good_requests_per_second == pytest.approx(0.5)
    assert summary.good_share == pytest.approx(0.25)
    assert summary.hit_rate == pytest.approx(5 / 30)
    assert summary.tbt_ms is not None
    assert summary.tbt_ms.count == 4
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.p50 == pytest.approx(500)


def test_a_load_that_failed_has_figures():
    summary = summarize([record(0.0, [], error="refused")], SLO)
    assert (summary.errors, summary.seconds, summary.output_tokens_per_second) == (1, 0.0, 0.0)
    assert summary.ttft_ms is None


def test_a_closed_loop_is_counted_while_all_places_are_taken():
    records = [
        record(0.0, [1.0]),  # the first of each place say when all have begun
        record(0.0, [0.5, 2.0]),
        record(1.0, [1.5, 2.5, 3.5]),
        record(2.0, [3.0, 4.0]),  # ends when the other place is free
    ]
    for index, one in enumerate(records):
        one.index = index
    summary = summarize_closed_loop(records, SLO, concurrency=2)
    assert summary.requests == 2
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == pytest.approx(750)
    assert summary.seconds == pytest.approx(2.5)
    assert summary.output_tokens_per_second == pytest.approx(5 / 2.5)  # from 1.0 on, before 3.5
    assert summary.requests_per_second == pytest.approx(2 / 2.5)
    assert summarize_closed_loop([record(0.0, [], error="refused")] * 4, SLO, 2).output_tokens_per_second == 0


def test_a_window_judges_requests_by_what_it_sees_of_them():
    ended = [
        record(0.0, [0.5, 1.95, 2.05, 2.15, 2.25]),  # 100 ms between tokens, but not long enough in the window
        record(2.1, [2.8, 2.9]),  # first token too late, 100 ms between tokens
        record(0.0, [0.1, 1.0]),  # before the window
        record(0.0, [], error="refused"),
    ]
    running = [
        record(0.0, [1.0, 2.0, 2.4, 2.8]),  # 400 ms between tokens
        record(0.0, [1.0, *(2.0 + 0.1 * step for step in range(10))]),
        record(2.2, []),  # has waited too long
        record(2.9, [], max_tokens=9),
        record(2.8, [3.5], max_tokens=9),  # answered after the window
    ]
    summary = summarize_window(ended, running, Slo(ttft_ms=600, ttft_ms_per_1k=0, tpot_ms=101), 2.0, 3.0)
    assert (summary.requests, summary.errors) == (6, 1)
    assert summary.good_share == pytest.approx(1 / 6)
    assert summary.output_tokens_per_second == pytest.approx(3 + 2 + 3 + 10)
    assert summary.requests_per_second == pytest.approx(2)
    assert summary.ttft_ms is not None
    assert sorted((summary.ttft_ms.p50, summary.ttft_ms.count)) == pytest.approx([3, 700])
    assert summary.tpot_ms is not None
    assert (summary.tpot_ms.count, summary.tpot_ms.mean) == pytest.approx((3, 200))
    assert summarize_window([], [], SLO, 1.0, 1.0).output_tokens_per_second == 0


def test_a_closed_loop_is_full_until_it_is_stopped_or_a_place_has_no_next_request():
    records = [record(0.0, [1.0]), record(0.0, [0.5, 2.0]), record(1.0, [1.5, 2.5, 3.5]), record(2.0, [3.0])]
    for index, one in enumerate(records):
        one.index = index
    assert full_time(records, 2, 4) == (1.0, 3.0)
    records[2].max_tokens = records[3].max_tokens = 9  # both run on
    assert full_time(records, 2, 4, stopped_at=4.0) == (1.0, 4.0)
    assert full_time([], 2, 4, stopped_at=4.0) == (0.0, 4.0)

"""The search for the highest rate: bisection, and what it says when it cannot know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from measuring import probe as probes
from measuring.client import RequestRecord, Target
from measuring.idle import count_requests
from measuring.load import LoadRun
from measuring.online_workloads import Synthetic
from measuring.probe import Judgement, Probe, Prober, Search, judge, judged
from measuring.search import Bracket, Verdict, bisect, num_probes
from measuring.server_process import Served
from measuring.statistics import Slo, summarize
from measuring.workload import Lengths


def held_below(limit: float, refused: float = float("inf")):
    """A probe of a server that can do `limit`, by a generator that can do `refused`, and the rates it was asked for."""
    rates: list[float] = []

    def probe(rate: float) -> Verdict:
        rates.append(rate)
        if rate > refused:
            return Verdict.REFUSED
        return Verdict.HELD if rate <= limit else Verdict.MISSED

    return probe, rates


@pytest.mark.parametrize("limit", [0.51, 1.0, 7.3, 31.0, 63.9])
def test_a_limit_inside_the_range_is_found_to_the_precision(limit: float):
    probe, rates = held_below(limit)
    bracket = bisect(probe, 0.5, 64.0, 0.05)
    assert len(rates) == num_probes(0.5, 64.0, 0.05) == 7
    if bracket.held is not None:
        assert limit / 1.05 <= bracket.held <= limit
    if bracket.missed is not None:
        assert limit < bracket.missed <= limit * 1.05
    assert not bracket.is_lower_bound or bracket.missed is None


def test_nothing_held_and_everything_held():
    nothing = bisect(held_below(0.1)[0], 1.0, 16.0, 0.1)
    assert nothing.held is None
    assert nothing.missed == pytest.approx(1.0, rel=0.1)
    assert not nothing.is_lower_bound
    everything = bisect(held_below(100.0)[0], 1.0, 16.0, 0.1)
    assert everything.held == pytest.approx(16.0, rel=0.1)
    assert everything.is_lower_bound


def test_a_slow_generator_gives_a_lower_bound():
    bracket = bisect(held_below(30.0, refused=10.0)[0], 1.0, 64.0, 0.05)
    assert bracket.held == pytest.approx(10.0, rel=0.05)
    assert bracket.is_lower_bound
    assert bracket.refused is not None
    bracket = bisect(held_below(5.0, refused=10.0)[0], 1.0, 64.0, 0.05)
    assert not bracket.is_lower_bound  # the server's own limit was seen below


@pytest.mark.parametrize(("low", "high", "precision"), [(0.0, 1.0, 0.1), (2.0, 1.0, 0.1), (1.0, 2.0, 0.0)])
def test_a_range_that_cannot_be_searched(low: float, high: float, precision: float):
    with pytest.raises(ValueError, match="cannot search"):
        bisect(held_below(1.0)[0], low, high, precision)


def test_a_search_that_ends_early_keeps_what_it_found():
    answers = iter([Verdict.HELD, Verdict.MISSED, None])
    rates: list[float] = []

    def probe(rate: float) -> Verdict | None:
        rates.append(rate)
        return next(answers)

    assert bisect(probe, 1.0, 256.0, 0.05) == Bracket(16.0, 64.0, None)
    assert rates == [16.0, 64.0, 32.0]
    assert Search("server", "poisson", 1, RULES).found == "not probed"


def test_a_narrow_range_needs_no_probe():
    assert num_probes(1.0, 1.05, 0.05) == 0
    assert num_probes(1.0, 1.10, 0.05) == 1


RULES = Judgement(Slo(500, 250, 50), share=0.99, warm_up=2, late_ms=20)


def records(count: int, ttft: float = 0.1, late: float = 0.0) -> list[RequestRecord]:
    made = []
    for index in range(count):
        record = RequestRecord(index, float(index), prompt_tokens=1000, max_tokens=2, sent=index + late)
        record.times.extend([index + ttft, index + ttft + 0.01])
        record.completion_tokens = 2
        made.append(record)
    return made


def test_the_warm_up_is_what_was_due_first():
    first, second, third, fourth = records(4)
    first.due = 9.0  # the turn of a session that waited for an answer
    assert judged([first, second, third, fourth], 2) == [fourth, first]


def test_99_of_100_hold_and_98_do_not():
    bad, good = records(2, ttft=0.76), records(100)
    assert judge(summarize(good[:99] + bad[:1], RULES.slo), RULES) is Verdict.HELD
    assert judge(summarize(good[:98] + bad, RULES.slo), RULES) is Verdict.MISSED


def test_late_sends_are_refused_whatever_the_server_did():
    assert judge(summarize(records(100, late=0.019), RULES.slo), RULES) is Verdict.HELD
    assert judge(summarize(records(100, late=0.021), RULES.slo), RULES) is Verdict.REFUSED


def test_requests_that_were_never_sent_are_missed():
    failed = records(10)
    for record in failed:
        record.sent, record.error = None, "no connection"
    assert judge(summarize(failed, RULES.slo), RULES) is Verdict.MISSED


def test_a_search_reports_its_best_rate():
    held = Probe(2.0, None, Verdict.HELD, summarize(records(9), RULES.slo), False, 0.0, 9.0, 0.1, 0.2, 0, [])
    missed = replace(held, rate=3.0, verdict=Verdict.MISSED)
    search = Search("server", "poisson", 1, RULES, [held, missed])
    assert search.best is held
    assert search.found == "2.00"
    search.probes = [held]
    assert search.found == "at least 2.00"
    search.probes = [missed]
    assert (search.best, search.found) == (None, "below 3.00")
    search.probes, search.failure = [], "it did not start"
    assert (search.best, search.found) == (None, "failed")


def test_a_probe_is_hopeless_when_the_rest_cannot_help():
    bad, good = records(4, ttft=0.76), records(102)
    assert not RULES.hopeless([*bad[:3], *good[4:6]], 100)  # two of the three that missed were the warm-up
    assert RULES.hopeless([*bad, good[4]], 100)
    assert not RULES.hopeless([], 100)


def test_requests_that_were_lost_miss(monkeypatch: pytest.MonkeyPatch):
    """All that ended were in time; two of the last ones still waited when the probe was stopped."""
    ended = records(50)
    lost = [RequestRecord(index, float(index), 1000, 2, sent=float(index), error="lost") for index in (50, 51)]

    class Idle:
        def __init__(self, *_: object) -> None: ...

        def wait(self, _: float) -> float:
            return 0.0

    monkeypatch.setattr(probes, "run_load", lambda *_, **__: LoadRun(ended, lost, [], 0.1, 60.0))
    monkeypatch.setattr(probes, "IdleWatch", Idle)
    prober = Prober(Target("http://h", "m"), Served("m", 4096, 100), seed=0, processes=1, idle_timeout=1)
    probe = prober.probe(Synthetic("s", Lengths(10, 2, 0.0, 0.0), 102), 1.0, RULES, 0)
    assert (probe.verdict, probe.stopped, probe.errors) == (Verdict.MISSED, True, [])
    assert probe.summary is not None
    assert probe.summary.good_share == pytest.approx(48 / 50)


def test_figures_count_from_the_first_judged_request():
    summary = summarize(records(10)[5:], RULES.slo, since=5.0)
    assert summary.seconds == pytest.approx(4.11)
    assert summary.requests_per_second == pytest.approx(5 / 4.11)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.p99 == pytest.approx(100)


def test_requests_are_counted_in_every_server_s_words():
    ours = 'vllm:num_requests_running{model_name="m"} 0.0\nvllm:num_requests_waiting{model_name="m"} 3.0\n'
    assert count_requests(ours) == 3
    assert count_requests('# HELP x\nsglang:num_running_reqs{a="b",c="d"} 2.0\nsglang:num_queue_reqs 0\n') == 2
    assert count_requests("vllm:num_requests_running_total 9\nother 4\n") == 0

"""Parts of the search script: a workload's own settings, and what a budget still allows."""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace

import pytest

from goodput import Task, describe, make_task, run_search
from measuring.client import RequestRecord
from measuring.online_workloads import OnlineWorkload, make_workload
from measuring.probe import Judgement, Probe, Search
from measuring.search import Verdict
from measuring.statistics import Slo, summarize

RULES = Judgement(Slo(500, 250, 50), share=0.99, warm_up=10, late_ms=20)
FLAGS = argparse.Namespace(
    range=None,
    requests=300,
    warm_up=30,
    precision=0.05,
    slo_ttft=500.0,
    slo_ttft_per_1k=250.0,
    slo_tpot=50.0,
    share=0.99,
    late=20.0,
    scale=1.0,
    think=1.0,
)


def test_a_workload_has_settings_of_its_own():
    plain = make_task("1k1k", FLAGS)
    assert (plain.requests, plain.precision, plain.rules) == (300, 0.05, Judgement(RULES.slo, 0.99, 30, 20))
    own = make_task("1k1k:range=2,4:requests=9:warm-up=1:precision=0.5:slo-ttft=1:slo-ttft-per-1k=2:slo-tpot=3", FLAGS)
    assert (own.rates, own.requests, own.precision) == ((2, 4), 9, 0.5)
    assert own.rules == Judgement(Slo(1, 2, 3), 0.99, 1, 20)


@pytest.mark.parametrize("text", ["1k1k:size=3", "1k1k:requests=0", "1k1k:warm-up=-1", "1k1k:requests=x", "no-file"])
def test_a_workload_that_there_is_not(text: str):
    with pytest.raises((ValueError, OSError)):
        make_task(text, FLAGS)


class SlowProber:
    """Stands for a server whose answers take 100 s after the last request has left."""

    def probe(self, _workload: OnlineWorkload, rate: float, _rules: Judgement, _number: int) -> Probe:
        return Probe(rate, None, Verdict.HELD, None, False, 0.0, 100 / rate + 100, 0.0, 0.0, 0, [])


def test_no_probe_begins_that_would_outlast_the_budget():
    task = Task(make_workload("1k1k", 100), (1, 16), 90, 0.05, RULES)
    kept: list[int] = []
    for allowed, probes in ((20, 0), (110, 1), (10_000, 6)):
        search = Search("server", "1k1k", 1, RULES)
        run_search(
            search,
            SlowProber(),
            task,
            probe_numbers=itertools.count(),
            deadline=time.monotonic() + allowed,
            keep=lambda: kept.append(1),
        )
        assert len(search.probes) == probes
    assert len(kept) == 7


def test_a_probe_as_short_as_its_answers_is_said_to_be_so():
    records = []
    for index in range(100):
        record = RequestRecord(index, index / 10, prompt_tokens=9, max_tokens=2, sent=index / 10, completion_tokens=2)
        record.times.extend([index / 10 + 1.0, index / 10 + 6.0])
        records.append(record)
    probe = Probe(10.0, None, Verdict.HELD, summarize(records, RULES.slo), False, 0.0, 16.0, 0.0, 0.0, 0, [])
    assert "answers take 6 s: the load had not settled" in describe(probe)
    assert "settled" not in describe(replace(probe, rate=5.0))
    assert "settled" not in describe(replace(probe, verdict=Verdict.MISSED))

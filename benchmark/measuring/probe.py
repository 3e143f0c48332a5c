"""Loads at one rate, judged: the steps of a search for the highest rate that a server holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from measuring.client import RequestRecord, Target
from measuring.idle import IdleWatch
from measuring.load import run_load
from measuring.online_workloads import Limits, OnlineWorkload
from measuring.report import cell_text
from measuring.search import Bracket, Verdict
from measuring.server_process import Served
from measuring.statistics import LoadSummary, Slo, summarize
from measuring.workload import Lengths, synthetic_load

WARM_UP_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Judgement:
    """Rules that a probe is judged by."""

    slo: Slo
    share: float  # share of requests that must be within the objectives
    warm_up: int  # requests at the start of each probe that are not judged
    late_ms: float  # p99 of the generator's lateness above which nothing is judged

    def hopeless(self, records: Sequence[RequestRecord], requests: int) -> bool:
        """Return True if so many of `requests` judged ones missed that the others cannot help; records of some."""
        missed = sum(not self.slo.met_by(record) for record in judged(records, self.warm_up))
        return (requests - missed) / requests < self.share


@dataclass(frozen=True, slots=True)
class Probe:
    """Outcome of one rate."""

    rate: float  # requests per second that were planned
    pace: float | None  # times a trace's own
    verdict: Verdict
    summary: LoadSummary | None  # summary of the judged requests that ended or were lost; None: refused
    stopped: bool  # before its end, because so many had missed
    idle_seconds: float  # until the server was idle before it
    seconds: float  # seconds that it took after that
    late_p99_ms: float  # lateness of sends
    generator_cpu: float  # share of a core that its busiest process used
    cut: int  # requests, or sessions, that did not fit into the context
    errors: list[str]  # the first three


@dataclass(slots=True)
class Search:
    """One workload on one server, as far as it came."""

    server: str
    workload: str
    round: int
    rules: Judgement
    probes: list[Probe] = field(default_factory=list)
    failure: str | None = None  # why no further probe followed

    @property
    def bracket(self) -> Bracket:
        return Bracket.of([(probe.rate, probe.verdict) for probe in self.probes])

    @property
    def best(self) -> Probe | None:
        """The probe at the highest rate that held."""
        held = self.bracket.held
        return next((probe for probe in self.probes if probe.rate == held), None)

    @property
    def found(self) -> str:
        """The found rate in words."""
        if not self.probes:
            return "failed" if self.failure else "not probed"
        bracket = self.bracket
        if bracket.held is None:
            return f"below {cell_text(min(probe.rate for probe in self.probes))}"
        return ("at least " if bracket.is_lower_bound else "") + cell_text(bracket.held)


def warm_up(target: Target, served: Served, seed: int) -> None:
    """Send a few short requests at once."""
    lengths = Lengths(min(256, served.context // 4), 16, 0.0, 0.0)
    load, _ = synthetic_load(
        seed + 10**6, [0.0] * WARM_UP_REQUESTS, lengths, vocab_size=served.vocab_size, context=served.context
    )
    run_load(target, load, label="warm up")


def judged(records: Sequence[RequestRecord], warm_up: int) -> list[RequestRecord]:
    """Return the records without the first `warm_up`, in the order in which requests were due."""
    return sorted(records, key=lambda record: record.due)[warm_up:]


def judge(summary: LoadSummary, rules: Judgement) -> Verdict:
    """Return the verdict on the figures of the judged requests."""
    if summary.send_delay_ms is not None and summary.send_delay_ms.p99 > rules.late_ms:
        return Verdict.REFUSED
    return Verdict.HELD if summary.good_share >= rules.share else Verdict.MISSED


class Prober:
    """Probes of one server, which is idle before each."""

    def __init__(self, target: Target, served: Served, *, seed: int, processes: int, idle_timeout: float) -> None:
        """Warm the server up. `idle.NotIdle` if it does not answer."""
        self._target = target
        self._limits = Limits(served.vocab_size, served.context)
        self._seed = seed
        self._processes = processes
        self._idle_timeout = idle_timeout
        warm_up(target, served, seed)
        self._idle = IdleWatch(target, served.vocab_size)

    def probe(self, workload: OnlineWorkload, rate: float, rules: Judgement, number: int) -> Probe:
        """Send the workload at a rate and judge it; `number` is another one each time, and tokens follow from it.

        `idle.NotIdle` if the server has not come to rest after what it did before.
        """
        load, num_cut = workload.load(rate, self._seed, self._seed + 1000 * (number + 1), self._limits)
        num_judged = len(load) - rules.warm_up
        idle_seconds = self._idle.wait(self._idle_timeout)
        begin = time.monotonic()
        run = run_load(
            self._target,
            load,
            processes=self._processes,
            label=f"{workload.name} {rate:.3g}/s",
            enough=lambda records: rules.hopeless(records, num_judged),
            lost=rules.slo.lost_by,
        )
        records = judged([*run.records, *run.lost], rules.warm_up)
        summary = summarize(records, rules.slo, since=records[0].due)
        verdict = judge(summary, rules)
        return Probe(
            rate=rate,
            pace=workload.pace(rate),
            verdict=verdict,
            summary=None if verdict is Verdict.REFUSED else summary,
            stopped=run.stopped,
            idle_seconds=idle_seconds,
            seconds=time.monotonic() - begin,
            late_p99_ms=summary.send_delay_ms.p99 if summary.send_delay_ms else 0.0,
            generator_cpu=run.cpu_share,
            cut=num_cut,
            errors=sorted({record.error for record in run.records if record.error})[:3],
        )

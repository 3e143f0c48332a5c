"""Figures that services are judged by, computed from the records of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from measuring.client import RequestRecord

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles (linear between neighbours) of some values."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int


def spread(values: Sequence[float] | FloatArray) -> Spread | None:
    """Return the mean and percentiles; None for no values."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Spread(float(np.mean(values)), p50, p90, p99, len(values))


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives: limits that a good answer keeps to, in ms."""

    ttft_ms: float  # to the first token, whatever the prompt
    ttft_ms_per_1k: float  # more for each 1,000 tokens of the prompt, cached or not
    tpot_ms: float  # mean time between the tokens of one answer

    def ttft_limit_ms(self, prompt_tokens: int) -> float:
        """Return the time in which the first token of an answer to so long a prompt must come."""
        return self.ttft_ms + self.ttft_ms_per_1k * prompt_tokens / 1e3

    def met_by(self, record: RequestRecord) -> bool:
        """Return True if the request succeeded within both limits."""
        if record.error is not None:
            return False
        between = record.time_per_token or 0.0
        return record.ttft * 1e3 <= self.ttft_limit_ms(record.prompt_tokens) and between * 1e3 <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One load, or its requests since some moment. Latencies count from when a request was due, in ms."""

    requests: int
    errors: int
    seconds: float
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    ttft_ms: Spread | None  # to the first token
    tbt_ms: Spread | None  # gaps between events with text
    tpot_ms: Spread | None  # mean time between the tokens of one answer
    end_to_end_ms: Spread | None
    good_requests_per_second: float  # that met the objectives
    good_share: float
    hit_rate: float  # of prompt tokens, found in the server's prefix cache
    tokens_per_event: float
    send_delay_ms: Spread | None  # the generator's own lateness: large values mean that it is too slow


def summarize(records: Sequence[RequestRecord], slo: Slo, *, since: float = 0.0) -> LoadSummary:
    """Return the figures of requests that were due at `since` or later; failed ones count as errors and nowhere else.

    `since` is in seconds after the start of the load; figures per second count from it.
    """
    done = [record for record in records if record.error is None]
    seconds = max((record.times[-1] - since for record in done), default=0.0)
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    gaps = [np.diff(record.times) * 1e3 for record in done]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.completion_tokens for record in done)
    num_events = sum(len(record.times) for record in done)
    good = sum(slo.met_by(record) for record in records)
    return LoadSummary(
        requests=len(records),
        errors=len(records) - len(done),
        seconds=seconds,
        requests_per_second=len(done) * per_second,
        prompt_tokens_per_second=prompt_tokens * per_second,
        output_tokens_per_second=output_tokens * per_second,
        ttft_ms=spread([record.ttft * 1e3 for record in done]),
        tbt_ms=spread(np.concatenate(gaps).tolist() if gaps else []),
        tpot_ms=spread([between * 1e3 for record in done if (between := record.time_per_token) is not None]),
        end_to_end_ms=spread([record.end_to_end * 1e3 for record in done]),
        good_requests_per_second=good * per_second,
        good_share=good / len(records) if records else 0.0,
        hit_rate=sum(record.cached_tokens for record in done) / prompt_tokens if prompt_tokens else 0.0,
        tokens_per_event=output_tokens / num_events if num_events else 0.0,
        send_delay_ms=spread([(record.sent - record.begin) * 1e3 for record in records if record.sent is not None]),
    )


def summarize_closed_loop(records: Sequence[RequestRecord], slo: Slo, concurrency: int) -> LoadSummary:
    """Return the figures of a closed loop's requests, in order: all but the first `concurrency`, whose answers are cut.

    Figures per second are of the time in which all places were taken: from when the first requests had their first
    tokens until the first of the last requests ended. They are 0 if there was no such time.
    """
    summary = summarize(records[concurrency:], slo)
    done = [record for record in records if record.error is None]
    begin = max((record.times[0] for record in done if record.index < concurrency), default=0.0)
    last = len(records) - concurrency
    end = min((record.times[-1] for record in done if record.index >= last), default=0.0)
    seconds = max(0.0, end - begin)
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    tokens = sum(record.completion_tokens * _share_between(record.times, begin, end) for record in done)
    ended = [record for record in done if begin <= record.times[-1] < end]
    return replace(
        summary,
        seconds=seconds,
        requests_per_second=len(ended) * per_second,
        prompt_tokens_per_second=sum(record.prompt_tokens for record in ended) * per_second,
        output_tokens_per_second=tokens * per_second,
        good_requests_per_second=sum(slo.met_by(record) for record in ended) * per_second,
    )


def _share_between(times: Sequence[float], begin: float, end: float) -> float:
    values = np.asarray(times)
    return float(np.mean((values >= begin) & (values < end)))

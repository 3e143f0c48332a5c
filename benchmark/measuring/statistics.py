"""Figures that services are judged by, computed from the records of requests."""

from __future__ import annotations

import math
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

    def lost_by(self, record: RequestRecord, now: float) -> bool:
        """Return True if a request that runs can no longer succeed within both limits, however fast its rest comes."""
        first = record.times[0] if record.times else now
        if (first - record.begin) * 1e3 > self.ttft_limit_ms(record.prompt_tokens):
            return True
        return len(record.times) < record.max_tokens and (now - first) * 1e3 > self.tpot_ms * (record.max_tokens - 1)


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
    good_requests_per_second: float  # requests within the objectives, per second
    good_share: float
    hit_rate: float  # share of prompt tokens found in the server's prefix cache
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


def full_time(
    records: Sequence[RequestRecord], concurrency: int, requests: int, stopped_at: float = math.inf
) -> tuple[float, float]:
    """Return the time in which all places of a closed loop of so many requests were taken, in seconds after the start.

    It lasts from when the first requests had their first tokens until the first of the last requests, which has none
    behind it, ended, or the loop was stopped.
    """
    firsts = [record.times[0] for record in records if record.index < concurrency and record.times]
    last = requests - concurrency
    ends = [one.times[-1] for one in records if one.index >= last and one.completion_tokens == one.max_tokens]
    begin = max(firsts, default=0.0)
    return begin, max(begin, min(ends, default=stopped_at))


def summarize_closed_loop(records: Sequence[RequestRecord], slo: Slo, concurrency: int) -> LoadSummary:
    """Return the figures of a closed loop's requests, in order: all but the first `concurrency`, whose answers are cut.

    Figures per second are of the time in which all places were taken; they are 0 if there was no such time.
    """
    summary = summarize(records[concurrency:], slo)
    done = [record for record in records if record.error is None]
    begin, end = full_time(done, concurrency, len(records), 0.0)
    seconds = end - begin
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


def summarize_window(
    ended: Sequence[RequestRecord], running: Sequence[RequestRecord], slo: Slo, begin: float, end: float
) -> LoadSummary:
    """Return the figures of what came between two moments, in seconds after the start of a load.

    A request is judged by what is seen of it in this time: its first token, if it was due there and has one or has
    waited too long, and its mean time between tokens, if all of its answer is seen, or at least half of the time was
    spent on it. `running` are requests that had not ended at the end.
    """
    done = [record for record in ended if record.error is None]
    errors = len(ended) - len(done)
    all_gaps, ttfts, betweens = [], [], []
    num_judged, num_good, num_tokens, num_events = errors, 0, 0.0, 0
    for record in (*done, *running):
        times = np.asarray([at for at in record.times if begin <= at < end])
        gaps = np.diff(times) * 1e3
        tokens_per_event = record.completion_tokens / max(len(record.times), 1)
        num_events += len(times)
        num_tokens += len(times) * tokens_per_event
        all_gaps.append(gaps)
        verdicts = []
        if begin <= record.begin < end:
            waited = ((record.times[0] if record.times else end) - record.begin) * 1e3
            limit = slo.ttft_limit_ms(record.prompt_tokens)
            if record.times or waited > limit:
                ttfts.append(waited)
                verdicts.append(waited <= limit)
        all_seen = record.completion_tokens == record.max_tokens and len(times) == len(record.times)
        if len(gaps) and (all_seen or gaps.sum() >= (end - begin) * 1e3 / 2):
            betweens.append(float(gaps.mean()) / tokens_per_event)
            verdicts.append(betweens[-1] <= slo.tpot_ms)
        num_judged += bool(verdicts)
        num_good += bool(verdicts) and all(verdicts)
    whole = [record for record in done if begin <= record.times[-1] < end]
    prompt_tokens = sum(record.prompt_tokens for record in whole)
    delays = [(record.sent - record.begin) * 1e3 for record in (*done, *running) if record.sent is not None]
    per_second = 1.0 / (end - begin) if end > begin else 0.0
    good_share = num_good / num_judged if num_judged else 0.0
    return LoadSummary(
        requests=num_judged,
        errors=errors,
        seconds=end - begin,
        requests_per_second=len(whole) * per_second,
        prompt_tokens_per_second=prompt_tokens * per_second,
        output_tokens_per_second=num_tokens * per_second,
        ttft_ms=spread(ttfts),
        tbt_ms=spread(np.concatenate(all_gaps).tolist() if all_gaps else []),
        tpot_ms=spread(betweens),
        end_to_end_ms=spread([record.end_to_end * 1e3 for record in whole]),
        good_requests_per_second=len(whole) * per_second * good_share,
        good_share=good_share,
        hit_rate=sum(record.cached_tokens for record in whole) / prompt_tokens if prompt_tokens else 0.0,
        tokens_per_event=num_tokens / num_events if num_events else 0.0,
        send_delay_ms=spread(delays),
    )


def _share_between(times: Sequence[float], begin: float, end: float) -> float:
    values = np.asarray(times)
    return float(np.mean((values >= begin) & (values < end)))

"""Counts and histograms that the API server keeps of every request, and the engine's load as the scheduler reports it.

They are updated for every token, so an update must be cheap. `prometheus` writes them for /metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from minisgl.core import FinishReason

TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.4, 0.8, 2.5, 10.0)
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram(msgspec.Struct):
    """Counts of values up to each bound and beyond the last, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def up_to(cls, bounds: tuple[float, ...]) -> Histogram:
        """Return a histogram without values."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class RequestMetrics:
    """Counts since the start, and log-probabilities held at the moment. Times are seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # sequences
        self.time_to_first_token = Histogram.up_to(FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram.up_to(TOKEN_SECONDS)
        self.request_latency = Histogram.up_to(REQUEST_SECONDS)  # from a request's submission to a sequence's end
        self.queue_time = Histogram.up_to(REQUEST_SECONDS)  # from the submission to the first step
        self.prefill_time = Histogram.up_to(REQUEST_SECONDS)  # from the first step to the first token
        self.decode_time = Histogram.up_to(REQUEST_SECONDS)  # from the first token to the last
        self.inference_time = Histogram.up_to(REQUEST_SECONDS)  # prefill and decode
        self.request_prompt_tokens = Histogram.up_to(TOKENS)
        self.request_generation_tokens = Histogram.up_to(TOKENS)
        self.request_max_num_generation_tokens = Histogram.up_to(TOKENS)  # tokens of a request's longest sequence
        self.held_logprobs = 0  # log-probabilities that open requests hold until they are written
        self.failed_accepts = 0  # connections refused by the limit of open files

    def prompt(self, num_tokens: int) -> None:
        """Count an accepted prompt."""
        self.prompt_tokens += num_tokens
        self.request_prompt_tokens.observe(num_tokens)


class SequenceClock(msgspec.Struct):
    """Times at which one sequence got its tokens."""

    metrics: RequestMetrics
    start: float
    last_token: float  # `start` before the first token
    num_tokens: int = 0
    admitted: float | None = None  # when the first step was planned; known at the end
    first_token: float | None = None
    reason: FinishReason | None = None  # reason of its end

    def tokens(self, count: int, now: float) -> None:
        """Count tokens that came at once, at least one."""
        metrics = self.metrics
        if self.num_tokens:
            metrics.inter_token_latency.observe((now - self.last_token) / count, count)
        else:
            metrics.time_to_first_token.observe(now - self.start)
            self.first_token = now
        self.last_token = now
        self.num_tokens += count
        metrics.generation_tokens += count

    def end(self, reason: FinishReason, now: float, admitted: float | None = None) -> None:
        """Count the sequence's end."""
        metrics = self.metrics
        metrics.finished[reason] += 1
        self.reason, self.admitted = reason, admitted
        if reason == "stop" or reason == "length":
            metrics.request_latency.observe(now - self.start)
            metrics.request_generation_tokens.observe(self.num_tokens)
            if admitted is not None and self.first_token is not None:
                metrics.queue_time.observe(admitted - self.start)
                metrics.prefill_time.observe(self.first_token - admitted)
                metrics.decode_time.observe(self.last_token - self.first_token)
                metrics.inference_time.observe(self.last_token - admitted)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Sequences, and tokens of the KV cache, at one moment."""

    running: int = 0  # sequences with a slot
    waiting: int = 0  # sequences in the waiting queue
    tokens_used: int = 0  # in pages that running sequences hold
    tokens_waiting: int = 0  # known tokens of waiting sequences
    max_tokens: int = 0  # capacity of the KV cache
    prefix_tokens_queried: int = 0  # prompt tokens looked up in the prefix cache, since the start
    prefix_tokens_hit: int = 0  # of these, tokens that were found
    generation_rate: float = 0.0  # tokens/s between the last two heartbeats
    window_usage: float = 0.0  # share of the windowed layers' pages that running sequences hold

    @classmethod
    def of(cls, counts: Mapping[str, int], page_size: int, generation_rate: float) -> EngineLoad:
        """Return the load according to the scheduler's counts, which are empty before the first heartbeat."""

        def held(kind: str) -> int:
            unlocked = counts.get(f"{kind}_cached", 0) - counts.get(f"{kind}_locked", 0)
            return counts.get(kind, 0) - counts.get(f"{kind}_free", 0) - unlocked

        return cls(
            counts.get("requests_running", 0),
            counts.get("requests_waiting", 0),
            held("pages") * page_size,
            counts.get("tokens_waiting", 0),
            counts.get("pages", 0) * page_size,
            counts.get("prefix_tokens_queried", 0),
            counts.get("prefix_tokens_hit", 0),
            generation_rate,
            held("window_pages") / max(counts.get("window_pages", 0), 1),
        )

    @property
    def usage(self) -> float:
        """Share of the KV cache that running sequences hold, from 0 to 1; of two pools, the fuller one's."""
        return max(self.tokens_used / self.max_tokens, self.window_usage) if self.max_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache, since the start."""
        return self.prefix_tokens_hit / self.prefix_tokens_queried if self.prefix_tokens_queried else 0.0

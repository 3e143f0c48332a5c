"""What the API server counts of every request, for /metrics. Cheap: it is on the way of every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from minisgl.core import FinishReason

TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.4, 0.8, 2.5, 10.0)
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """Counts of values up to each bound and beyond the last, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        return sum(self.counts)


class RequestMetrics:
    """All that has been seen since the start. Times are seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # sequences
        self.time_to_first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.request_latency = Histogram(REQUEST_SECONDS)  # from its submission to a sequence's end
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        self.failed_accepts = 0  # of connections, because the process may open no more files

    def prompt(self, num_tokens: int) -> None:
        """A prompt is accepted."""
        self.prompt_tokens += num_tokens
        self.request_prompt_tokens.observe(num_tokens)


class SequenceClock:
    """When one sequence got its tokens."""

    __slots__ = ("_last", "_metrics", "_start", "_tokens")

    def __init__(self, metrics: RequestMetrics, start: float) -> None:
        self._metrics = metrics
        self._start = start
        self._last = start  # when the last token came
        self._tokens = 0

    def tokens(self, count: int, now: float) -> None:
        """So many tokens have come at once, one at least."""
        metrics = self._metrics
        if self._tokens:
            metrics.inter_token_latency.observe((now - self._last) / count, count)
        else:
            metrics.time_to_first_token.observe(now - self._start)
        self._last = now
        self._tokens += count
        metrics.generation_tokens += count

    def end(self, reason: FinishReason, now: float) -> None:
        """The sequence has ended."""
        metrics = self._metrics
        metrics.finished[reason] += 1
        if reason == "stop" or reason == "length":
            metrics.request_latency.observe(now - self._start)
            metrics.request_generation_tokens.observe(self._tokens)

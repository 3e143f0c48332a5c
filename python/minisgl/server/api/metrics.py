"""Counts that the API server keeps of every request, cheap since they are on the way of every token, and their text.

/metrics writes them for Prometheus. Each metric has three names, minisgl's and those that dashboards of vLLM and SGLang
ask for; where SGLang has another word for it, it has that too. The engine's load, of which routers ask, is in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.core import FinishReason

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIXES = ("minisgl:", "vllm:", "sglang:")
SNAPSHOT_COUNTS = {  # counts of the scheduler, where the model has recurrent layers
    "snapshot_hits": "sequences that went on from a snapshot of recurrent states",
    "snapshots_saved": "snapshots of recurrent states that were saved",
    "snapshots_evicted": "snapshots of recurrent states that gave way to others or went with their pages",
}
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
    """Counts since the start. Times are seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # sequences
        self.time_to_first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.request_latency = Histogram(REQUEST_SECONDS)  # from its submission to a sequence's end
        self.queue_time = Histogram(REQUEST_SECONDS)  # from its submission to its first step
        self.prefill_time = Histogram(REQUEST_SECONDS)  # from there to its first token
        self.decode_time = Histogram(REQUEST_SECONDS)  # from there to its last
        self.inference_time = Histogram(REQUEST_SECONDS)  # prefill and decode
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        self.request_max_num_generation_tokens = Histogram(TOKENS)  # tokens of a request's longest sequence
        self.failed_accepts = 0  # connections refused by the limit of open files

    def prompt(self, num_tokens: int) -> None:
        """Count an accepted prompt."""
        self.prompt_tokens += num_tokens
        self.request_prompt_tokens.observe(num_tokens)


class SequenceClock:
    """Times at which one sequence got its tokens."""

    __slots__ = ("_metrics", "admitted", "first_token", "last_token", "num_tokens", "reason", "start")

    def __init__(self, metrics: RequestMetrics, start: float) -> None:
        self._metrics = metrics
        self.num_tokens = 0
        self.start = start
        self.admitted: float | None = None  # known at the end: when its first step was planned
        self.first_token: float | None = None
        self.last_token = start
        self.reason: FinishReason | None = None  # reason of its end

    def tokens(self, count: int, now: float) -> None:
        """Count tokens that have come at once, one at least."""
        metrics = self._metrics
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
        metrics = self._metrics
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
    """Sequences, and tokens of the KV cache, at one look."""

    running: int = 0  # sequences that are computed
    waiting: int = 0  # sequences that wait for their turn
    tokens_used: int = 0  # in pages that running sequences hold
    tokens_waiting: int = 0  # known tokens of those that wait
    max_tokens: int = 0  # capacity of the KV cache
    prefix_tokens_queried: int = 0  # prompt tokens looked for in the cache, since the start
    prefix_tokens_hit: int = 0  # tokens of these that were found
    generation_rate: float = 0.0  # tokens/s between the last two heartbeats
    window_usage: float = 0.0  # share of the windowed layers' pages that running sequences hold

    @classmethod
    def of(cls, counts: Mapping[str, int], page_size: int, generation_rate: float) -> EngineLoad:
        """Return the load that the scheduler's counts say; without any (before the first heartbeat) there is none."""

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
        """Share of the KV cache that running sequences hold, of the fuller pool if there are two; 1 is all."""
        return max(self.tokens_used / self.max_tokens, self.window_usage) if self.max_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the cache, since the start."""
        return self.prefix_tokens_hit / self.prefix_tokens_queried if self.prefix_tokens_queried else 0.0


class Exposition:
    """One look at all metrics, as a collector of the client library, which only writes the format."""

    def __init__(
        self, model: str, requests: RequestMetrics, load: EngineLoad, counts: Mapping[str, int], page_size: int
    ) -> None:
        self._labels = {"model_name": model}
        self._requests = requests
        self._load = load
        self._retractions = counts.get("retractions", 0)
        self._evicted_pages = counts.get("pages_evicted", 0)
        self._snapshots = {name: counts.get(name, 0) for name in SNAPSHOT_COUNTS}
        self._page_size = page_size

    def text(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest  # slow to import, and few ask

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Metric]:
        """Return nothing to check names against: the registry lives for one answer."""
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        pages = {"block_size": str(self._page_size), "num_gpu_blocks": str(self._load.max_tokens // self._page_size)}
        info = GaugeMetricFamily("vllm:cache_config_info", "pages of the KV cache", labels=[*names, *pages])
        info.add_metric([*values, *pages.values()], 1)
        yield info
        for prefix in PREFIXES:
            gauges = self._gauges() | (self._sglang_gauges() if prefix == "sglang:" else {})
            for name, (text, value) in gauges.items():
                gauge = GaugeMetricFamily(prefix + name, text, labels=names)
                gauge.add_metric(values, value)
                yield gauge
            for name, (text, value) in self._counters().items():
                counter = CounterMetricFamily(prefix + name, text, labels=names)
                counter.add_metric(values, value)
                yield counter
            finished = CounterMetricFamily(
                prefix + "request_success", "ended sequences", labels=[*names, "finished_reason"]
            )
            for reason, count in self._requests.finished.items():
                finished.add_metric([*values, reason], count)
            yield finished
            for name, (text, histogram) in self._histograms().items():
                family = HistogramMetricFamily(prefix + name, text, labels=names)
                family.add_metric(values, _buckets(histogram), histogram.sum)
                yield family

    def _gauges(self) -> dict[str, tuple[str, float]]:
        load = self._load
        return {
            "num_requests_running": ("sequences that are computed", load.running),
            "num_requests_waiting": ("sequences that wait for their turn", load.waiting),
            "kv_cache_usage_perc": ("share of the KV cache that running sequences hold; 1 is all", load.usage),
        }

    def _sglang_gauges(self) -> dict[str, tuple[str, float]]:
        load = self._load
        return {
            "num_running_reqs": ("sequences that are computed", load.running),
            "num_queue_reqs": ("sequences that wait for their turn", load.waiting),
            "num_used_tokens": ("tokens in pages that running sequences hold", load.tokens_used),
            "max_total_num_tokens": ("tokens that the KV cache holds", load.max_tokens),
            "token_usage": ("share of the KV cache that running sequences hold; 1 is all", load.usage),
            "cache_hit_rate": ("share of prompt tokens found in the cache, since the start", load.hit_rate),
            "gen_throughput": ("tokens/s between the last two heartbeats", load.generation_rate),
        }

    def _counters(self) -> dict[str, tuple[str, int]]:
        load, requests = self._load, self._requests
        return {
            "prefix_cache_queries": ("prompt tokens looked for in the cache", load.prefix_tokens_queried),
            "prefix_cache_hits": ("prompt tokens found in the cache", load.prefix_tokens_hit),
            "evicted_pages": ("pages of the cache that gave way to requests", self._evicted_pages),
            **{f"state_{name}": (text, self._snapshots[name]) for name, text in SNAPSHOT_COUNTS.items()},
            "num_preemptions": ("sequences that had to make room and wait again", self._retractions),
            "prompt_tokens": ("tokens of accepted prompts", requests.prompt_tokens),
            "generation_tokens": ("tokens generated", requests.generation_tokens),
            "failed_accepts": ("accepts that failed for want of files to open", requests.failed_accepts),
        }

    def _histograms(self) -> dict[str, tuple[str, Histogram]]:
        requests = self._requests
        return {
            "time_to_first_token_seconds": ("from a request to its first token", requests.time_to_first_token),
            "inter_token_latency_seconds": ("from a token to the next", requests.inter_token_latency),
            "e2e_request_latency_seconds": ("from a request to the end of an answer", requests.request_latency),
            "request_queue_time_seconds": ("from a request to its first step", requests.queue_time),
            "request_prefill_time_seconds": ("from a request's first step to its first token", requests.prefill_time),
            "request_decode_time_seconds": ("from a request's first token to its last", requests.decode_time),
            "request_inference_time_seconds": ("prefill and decode of a request", requests.inference_time),
            "request_prompt_tokens": ("tokens of a prompt", requests.request_prompt_tokens),
            "request_generation_tokens": ("tokens of an answer", requests.request_generation_tokens),
            "request_max_num_generation_tokens": (
                "tokens of a request's longest answer",
                requests.request_max_num_generation_tokens,
            ),
        }


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulated counts, as the format wants them."""
    total, buckets = 0, []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return buckets

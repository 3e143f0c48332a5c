"""The counts of the server as Prometheus text. Each metric has two names, minisgl's and vLLM's, which dashboards know.

The client library only writes the format: what is counted, and when, is `metrics` and `heartbeat`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from minisgl.server.api.status.metrics import Histogram, RequestMetrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIXES = ("minisgl:", "vllm:")


class Exposition:
    """One look at all metrics, as a collector of the client library."""

    def __init__(self, model: str, requests: RequestMetrics, scheduler: Mapping[str, int]) -> None:
        self._labels = {"model_name": model}
        self._requests = requests
        self._scheduler = scheduler  # its counts, empty before the first heartbeat

    def text(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest  # slow to import, and few ask

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Metric]:
        """Nothing to check names against: the registry lives for one answer."""
        return []

    def collect(self) -> Iterator[Metric]:
        for prefix in PREFIXES:
            yield from self._gauges(prefix)
            yield from self._counters(prefix)
            yield from self._histograms(prefix)

    def _gauges(self, prefix: str) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        counts = self._scheduler
        pages = counts.get("pages", 0)
        in_use = pages - counts.get("pages_free", 0) - counts.get("pages_cached", 0) + counts.get("pages_locked", 0)
        gauges = {
            "num_requests_running": ("sequences that are computed", counts.get("requests_running", 0)),
            "num_requests_waiting": ("sequences that wait for their turn", counts.get("requests_waiting", 0)),
            "kv_cache_usage_perc": (
                "share of the KV cache that running sequences hold; 1 is all",
                in_use / pages if pages else 0.0,
            ),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(prefix + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family

    def _counters(self, prefix: str) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        counts, requests = self._scheduler, self._requests
        counters = {
            "prefix_cache_queries": ("prompt tokens looked for in the cache", counts.get("prefix_tokens_queried", 0)),
            "prefix_cache_hits": ("prompt tokens found in the cache", counts.get("prefix_tokens_hit", 0)),
            "num_preemptions": ("sequences that had to make room and wait again", counts.get("retractions", 0)),
            "prompt_tokens": ("tokens of accepted prompts", requests.prompt_tokens),
            "generation_tokens": ("tokens generated", requests.generation_tokens),
            "failed_accepts": ("accepts that failed for want of files to open", requests.failed_accepts),
        }
        for name, (text, value) in counters.items():
            family = CounterMetricFamily(prefix + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        finished = CounterMetricFamily(
            prefix + "request_success", "ended sequences", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in requests.finished.items():
            finished.add_metric([*self._labels.values(), reason], count)
        yield finished

    def _histograms(self, prefix: str) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        requests = self._requests
        histograms = {
            "time_to_first_token_seconds": ("from a request to its first token", requests.time_to_first_token),
            "inter_token_latency_seconds": ("from a token to the next", requests.inter_token_latency),
            "e2e_request_latency_seconds": ("from a request to the end of an answer", requests.request_latency),
            "request_prompt_tokens": ("tokens of a prompt", requests.request_prompt_tokens),
            "request_generation_tokens": ("tokens of an answer", requests.request_generation_tokens),
        }
        for name, (text, histogram) in histograms.items():
            family = HistogramMetricFamily(prefix + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), _buckets(histogram), histogram.sum)
            yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulated, as the format wants them."""
    total, buckets = 0, []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return buckets

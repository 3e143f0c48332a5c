"""Text of /metrics for Prometheus.

Each metric has three names: minisgl's, and those that dashboards of vLLM and SGLang ask for. Where SGLang has another
word for a metric, it has that too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.server.api.metrics import EngineLoad, Histogram, RequestMetrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIXES = ("minisgl:", "vllm:", "sglang:")
SNAPSHOT_COUNTS = {  # counts of the scheduler, where the model has recurrent layers
    "snapshot_hits": "sequences that went on from a snapshot of recurrent states",
    "snapshots_saved": "snapshots of recurrent states that were saved",
    "snapshots_evicted": "snapshots of recurrent states that gave way to others or went with their pages",
}


@dataclass(frozen=True, slots=True)
class Exposition:
    """Metrics at one moment, as a collector of prometheus_client, which writes the text."""

    model: str
    requests: RequestMetrics
    load: EngineLoad
    counts: Mapping[str, int]  # counts of the scheduler
    page_size: int

    def text(self) -> bytes:
        from prometheus_client import generate_latest  # slow to import, and few ask

        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, values = ["model_name"], [self.model]
        pages = {"block_size": str(self.page_size), "num_gpu_blocks": str(self.load.max_tokens // self.page_size)}
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
            for reason, count in self.requests.finished.items():
                finished.add_metric([*values, reason], count)
            yield finished
            for name, (text, histogram) in self._histograms().items():
                family = HistogramMetricFamily(prefix + name, text, labels=names)
                family.add_metric(values, _buckets(histogram), histogram.sum)
                yield family

    def _gauges(self) -> dict[str, tuple[str, float]]:
        load = self.load
        return {
            "num_requests_running": ("sequences that are computed", load.running),
            "num_requests_waiting": ("sequences that wait for their turn", load.waiting),
            "kv_cache_usage_perc": ("share of the KV cache that running sequences hold; 1 is all", load.usage),
        }

    def _sglang_gauges(self) -> dict[str, tuple[str, float]]:
        load = self.load
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
        load, requests = self.load, self.requests
        return {
            "prefix_cache_queries": ("prompt tokens looked for in the cache", load.prefix_tokens_queried),
            "prefix_cache_hits": ("prompt tokens found in the cache", load.prefix_tokens_hit),
            "evicted_pages": ("pages of the cache that gave way to requests", self.counts.get("pages_evicted", 0)),
            **{f"state_{name}": (text, self.counts.get(name, 0)) for name, text in SNAPSHOT_COUNTS.items()},
            "num_preemptions": ("sequences that had to make room and wait again", self.counts.get("retractions", 0)),
            "prompt_tokens": ("tokens of accepted prompts", requests.prompt_tokens),
            "generation_tokens": ("tokens generated", requests.generation_tokens),
            "failed_accepts": ("accepts that failed for want of files to open", requests.failed_accepts),
        }

    def _histograms(self) -> dict[str, tuple[str, Histogram]]:
        requests = self.requests
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
    """Return cumulative counts by bound, as the format wants them."""
    total, buckets = 0, []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return buckets

"""OpenTelemetry traces of requests, through the library (extra `otel`), with the attributes of its GenAI conventions.

A request is one span, made when its answer has ended, and each of its first sequences three below it: `queue` (from
its arrival to its first step, tokenization included), `prefill` (to its first token) and `decode` (to its last). The
times were taken anyway, for /metrics, so tokens cost nothing; spans are sent from a thread of the library.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minisgl import __version__
from minisgl.config import ConfigError
from minisgl.optional_packages import can_be_found
from minisgl.server.api.metrics import SequenceClock

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from starlette.types import Scope

    from minisgl.server.api.requests.open_request import OpenRequest

# Sequences of a request that have spans. Those of 8,192 would hold the event loop for 0.4 s, and the library, which
# keeps 2,048 spans until it sends them, would drop those of other requests.
MAX_TRACED_SEQUENCES = 64
FLUSH_MILLISECONDS = 1000  # at the server's end, for spans that have not been sent
LOG_SECONDS = 60.0  # between two log lines of the library
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}


def check_otel() -> None:
    """Raise ConfigError if the packages of the extra are missing."""
    modules = "opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"
    if not all(map(can_be_found, modules)):
        raise ConfigError("--otlp-endpoint needs OpenTelemetry's packages: pip install 'minisgl[otel]'")


class LogLimit(logging.Filter):
    """Lets one log line of the library through in LOG_SECONDS: it writes 21 a minute while no collector answers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("opentelemetry")
        self._clock = clock
        self._logged = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):  # another package's
            return True
        now = self._clock()
        if now < self._logged + LOG_SECONDS:
            return False
        self._logged = now
        return True


class Tracer:
    """Sends spans to a collector. `endpoint` is its URL; without a path, OTLP's /v1/traces is meant."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry import trace  # an extra, and slow to import
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "minisgl")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        self._tracer = self._provider.get_tracer("minisgl", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._model = model
        for handler in logging.getLogger().handlers:
            handler.addFilter(LogLimit())

    def record(self, request: OpenRequest, answer_id: str, scope: Scope) -> None:
        """Make the spans of a request whose answer has ended, below the client's traceparent if it sent one."""
        trace = self._trace
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        epoch = time.time() - time.perf_counter()  # the clocks count from another zero
        operation = OPERATIONS.get(scope["path"], "text_completion")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            self._propagator.extract(headers),
            trace.SpanKind.SERVER,
            {**dict(self._attributes(request)), "gen_ai.operation.name": operation, "gen_ai.response.id": answer_id},
            start_time=_nanoseconds(request.clocks[0].start + epoch),
        )
        if request.has_failed or any(clock.reason in (None, "abort", "error") for clock in request.clocks):
            span.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(span)
        for index, clock in enumerate(request.clocks[:MAX_TRACED_SEQUENCES]):
            for name, begin, end in phases(clock):
                phase: Span = self._tracer.start_span(
                    name,
                    context,
                    attributes={"minisgl.choice": index},
                    start_time=_nanoseconds(begin + epoch),
                )
                phase.end(_nanoseconds(end + epoch))
        span.end(_nanoseconds(time.time()))

    def _attributes(self, request: OpenRequest) -> Iterator[tuple[str, Any]]:
        sampling = request.job.sampling
        yield "gen_ai.provider.name", "minisgl"
        yield "gen_ai.request.model", self._model
        yield "gen_ai.response.model", self._model
        yield "gen_ai.request.temperature", sampling.temperature
        yield "gen_ai.request.top_p", sampling.top_p
        yield "gen_ai.request.top_k", sampling.top_k
        if sampling.max_tokens is not None:
            yield "gen_ai.request.max_tokens", sampling.max_tokens
        yield "gen_ai.request.choice.count", request.job.num_choices
        yield "gen_ai.usage.input_tokens", request.prompt_tokens
        yield "gen_ai.usage.output_tokens", request.completion_tokens
        yield "gen_ai.usage.cache_read.input_tokens", request.cached_tokens
        yield "gen_ai.response.finish_reasons", [clock.reason or "abort" for clock in request.clocks]
        yield "minisgl.request_id", request.id

    def close(self) -> None:
        """Send the spans that are left, within FLUSH_MILLISECONDS."""
        self._provider.force_flush(FLUSH_MILLISECONDS)


def phases(clock: SequenceClock) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end of each phase that a sequence went through, in seconds of `perf_counter`."""
    if clock.admitted is not None:
        yield "queue", clock.start, clock.admitted
        if clock.first_token is not None:
            yield "prefill", clock.admitted, clock.first_token
    if clock.first_token is not None:
        yield "decode", clock.first_token, clock.last_token


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

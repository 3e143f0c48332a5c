"""Views of the real server for routers and operators: cached prefixes, metrics, logs, traces."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from minisgl.server.api.routes.glass_box import MIN_INTERVAL
from minisgl.server.api.tracing import Tracer
from support.kv_subscriber import KVSubscriber
from support.server import PATIENCE, Server, wait_until

HAS_OTEL = importlib.util.find_spec("opentelemetry") is not None
PAGE_SIZE = 8
TOPIC = b"kv"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Router:
    """A subscriber to KV events, written like those of vLLM and SGLang, that knows only what the events say."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        host = info["endpoint_host"]
        self.events = self._context.socket(zmq.SUB)
        self.events.connect(f"tcp://{host}:{info['endpoint_port_base']}")
        self.events.subscribe(info["topic"])
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.set(zmq.RCVTIMEO, round(PATIENCE * 1000))
        self._replay.connect(f"tcp://{host}:{info['replay_endpoint_port_base']}")
        self.cached = KVSubscriber()
        self.next = 0

    def catch_up(self) -> None:
        """Ask for what was missed."""
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return
            self._take(number, payload)

    def receive(self) -> None:
        """Take what has arrived."""
        while self.events.poll(0):
            topic, number, payload = self.events.recv_multipart()
            assert topic == TOPIC
            if int.from_bytes(number, "big") >= self.next:
                self._take(number, payload)

    def _take(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next, "no batch is missing"
        self.next += 1
        time, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(time, float)
        assert rank == 0
        for event in events:
            self.cached.apply(event)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector: keeps what is posted to /v1/traces."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        scopes = [scope for request in requests for part in request.resource_spans for scope in part.scope_spans]
        return [span for scope in scopes for span in scope.spans]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector
        collector.shutdown()


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Server]:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
        "topic": TOPIC.decode(),
    }
    pages = ("--page-size", str(PAGE_SIZE), "--num-pages", "40")
    flags = ["--max-seq-len-override", "256", "--kv-events-config", json.dumps(config), "--log-format", "json"]
    if HAS_OTEL:
        flags += ["--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}"]
    with Server(*pages, *flags) as server:
        yield server


@pytest.fixture
def router(server: Server) -> Iterator[Router]:
    block = get(server, "/server_info").json()["kv_events"]
    assert (block["publisher"], block["block_size"], block["dp_size"]) == ("zmq", PAGE_SIZE, 1)
    router = Router(block)

    def hears() -> bool:
        """Only an event shows that the server knows of the subscription; without it, it drops what it publishes."""
        flush(server)
        return bool(router.events.poll(100))

    wait_until(hears)
    router.catch_up()
    yield router
    router.close()


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=PATIENCE)


def flush(server: Server) -> int:
    """Empty the prefix cache; return the number of its pages."""
    pages: int = httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE).json()["pages"]
    return pages


def generate(server: Server, text: str) -> list[int]:
    """Return the ids of prompt and answer."""
    body = {"prompt": text, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE).json()
    return [*answer["prompt_token_ids"], *answer["token_ids"]]


def test_a_router_knows_the_cached_prefixes(server: Server, router: Router) -> None:
    texts = [f"{'a shared beginning of some length, ' * 2}{index} and then {index * 7919}" for index in range(8)]
    for text in texts:  # more than the pages hold: the first are evicted
        ids = generate(server, text)
    whole = (len(ids) - 1) // PAGE_SIZE * PAGE_SIZE  # the last token's K and V are never computed
    prefixes = {tuple(ids[:end]) for end in range(PAGE_SIZE, whole + 1, PAGE_SIZE)}

    def knows() -> bool:
        router.receive()
        counts = server.info()["scheduler-0"]
        return prefixes <= router.cached.prefixes and len(router.cached.prefixes) == counts["pages_cached"]

    wait_until(knows, lambda: str(len(router.cached.prefixes)))
    assert flush(server) == len(router.cached.prefixes)

    def is_empty() -> bool:
        router.receive()
        return not router.cached.prefixes

    wait_until(is_empty)


def state_of(server: Server, since: int = -1) -> dict[str, Any]:
    state: dict[str, Any] = get(server, f"/debug/state?since={since}").json()
    return state


def test_the_glass_box_shows_all_work_and_the_numbers_of_metrics(server: Server) -> None:
    flush(server)
    before = state_of(server)  # from here on steps are recorded
    known = {step["begin"] for step in before["steps"]}
    seen: dict[float, dict[str, Any]] = {}
    texts = ["a prompt that comes a second time, and finds its pages in the cache"] * 2
    texts += [
        f"{number} of some that fill all pages of the cache, so that others must go {number}" for number in range(5)
    ]
    lengths = []
    for text in texts:
        lengths.append(len(generate(server, text)))
        last = max((step["step"] for step in seen.values()), default=-1)
        seen |= {step["begin"]: step for step in state_of(server, last)["steps"]}  # one that has grown comes again
    server.wait_idle()
    time.sleep(MIN_INTERVAL)  # an answer may be that old
    after = state_of(server)
    seen |= {step["begin"]: step for step in after["steps"]}
    was, now, steps = before["load"], after["load"], [step for begin, step in seen.items() if begin not in known]
    queried, hit = (now[name] - was[name] for name in ("prefix_tokens_queried", "prefix_tokens_hit"))
    assert queried == after["prompt_tokens"] - before["prompt_tokens"]
    assert hit >= (lengths[0] - 12 - 1) // PAGE_SIZE * PAGE_SIZE
    assert sum(step["prefill_tokens"] for step in steps) == queried - hit
    assert sum(step["decodes"] * step["count"] for step in steps) == 7 * 11, "a prompt's last chunk brings the first"
    counts, nodes = after["engine"]["counts"], after["engine"]["nodes"]
    assert sum(node["pages"] for node in nodes) == counts["pages_cached"]
    assert counts["pages_evicted"] > before["engine"]["counts"]["pages_evicted"]
    assert {node["parent"] for node in nodes} <= {None, *(node["last"] for node in nodes)}
    assert after["engine"]["sequences"] == []

    metrics = get(server, "/metrics").text
    values = dict(re.findall(r'^minisgl:([\w:]+){model_name="demo"} (\S+)$', metrics, re.MULTILINE))
    told = {
        "num_requests_running": now["running"],
        "num_requests_waiting": now["waiting"],
        "kv_cache_usage_perc": now["tokens_used"] / now["max_tokens"],
        "prefix_cache_queries_total": now["prefix_tokens_queried"],
        "prefix_cache_hits_total": now["prefix_tokens_hit"],
        "num_preemptions_total": counts["retractions"],
        "evicted_pages_total": counts["pages_evicted"],
        "prompt_tokens_total": after["prompt_tokens"],
        "generation_tokens_total": after["generation_tokens"],
        "time_to_first_token_seconds_count": sum(after["time_to_first_token"]["counts"]),
        "time_to_first_token_seconds_sum": after["time_to_first_token"]["sum"],
        "inter_token_latency_seconds_count": sum(after["time_between_tokens"]["counts"]),
        "inter_token_latency_seconds_sum": after["time_between_tokens"]["sum"],
    }
    assert {name: float(values[name]) for name in told} == {name: float(value) for name, value in told.items()}


def test_a_late_subscriber_asks_for_a_replay(server: Server, router: Router) -> None:
    generate(server, "whatever fills a few pages of the cache, all of them whole")
    wait_until(lambda: server.info()["scheduler-0"]["pages_cached"] > 0)
    late = Router(get(server, "/server_info").json()["kv_events"])
    late.catch_up()
    router.catch_up()
    assert late.cached.prefixes == router.cached.prefixes != set()
    late.close()


def test_each_line_of_the_log_is_an_object(server: Server) -> None:
    headers = {"x-request-id": "the-clients-own-id"}
    httpx.post(f"{server.url}/generate", json={"prompt": "x", "max_tokens": 2}, headers=headers, timeout=PATIENCE)

    def lines() -> list[dict[str, str]]:
        return [json.loads(line) for line in server.log]

    wait_until(lambda: any(line.get("request_id") == "the-clients-own-id" for line in lines()))
    (access,) = (line for line in lines() if line.get("request_id") == "the-clients-own-id")
    assert access["message"].startswith("127.0.0.1 POST /generate 200 ")
    assert (access["level"], access["process"]) == ("info", "api")
    assert access["logger"] == "minisgl.server.api.http.middleware"
    assert {line["process"] for line in lines()} == {"main", "scheduler-0", "api"}
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines())


@pytest.mark.skipif(not HAS_OTEL, reason="needs the extra otel")
@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_the_url_of_a_collector_may_have_its_path(path: str) -> None:
    with Collector() as collector:
        tracer = Tracer(f"http://127.0.0.1:{collector.server_port}{path}", "m")
        tracer._tracer.start_span("a span").end()
        tracer.close()
        assert [span.name for span in collector.spans()] == ["a span"]
        collector.shutdown()


@pytest.mark.skipif(not HAS_OTEL, reason="needs the extra otel")
def test_a_trace_has_the_phases_of_a_request_below_its_clients_span(server: Server, collector: Collector) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    body = {"messages": [{"role": "user", "content": "What is a page?"}], "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE).json()

    def ours() -> dict[str, Any]:
        return {span.name: span for span in collector.spans() if span.trace_id.hex() == trace_id}

    wait_until(lambda: "chat demo" in ours())  # it ends last
    spans = ours()
    request = spans.pop("chat demo")
    assert request.parent_span_id.hex() == span_id
    attributes = {one.key: one.value for one in request.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "chat"
    assert attributes["gen_ai.response.id"].string_value == answer["id"]
    assert attributes["gen_ai.usage.input_tokens"].int_value == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == answer["usage"]["completion_tokens"]
    assert attributes["gen_ai.request.max_tokens"].int_value == 5
    assert list(spans) == ["queue", "prefill", "decode"]
    assert {span.parent_span_id for span in spans.values()} == {request.span_id}
    times = [time for span in spans.values() for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert request.start_time_unix_nano <= times[0]
    assert times[-1] <= request.end_time_unix_nano


def test_a_missing_extra_ends_the_start() -> None:
    code = "import sys; sys.modules['opentelemetry.sdk'] = None; sys.argv[1:] = ['--otlp-endpoint', 'http://localhost']"
    command = [sys.executable, "-c", f"{code}; from minisgl.__main__ import main; sys.exit(main())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'minisgl[otel]'")


VLLM_DASHBOARD = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
    prompt_tokens_total generation_tokens_total inter_token_latency_seconds_bucket num_requests_running
    num_requests_waiting time_to_first_token_seconds_bucket kv_cache_usage_perc request_prompt_tokens_bucket
    request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum
    request_prefill_time_seconds_sum request_decode_time_seconds_sum request_max_num_generation_tokens_sum
"""
SGLANG_DASHBOARD = """
    e2e_request_latency_seconds_bucket time_to_first_token_seconds_bucket num_running_reqs gen_throughput
    cache_hit_rate num_queue_reqs
"""
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards" / "serving.json"


def test_dashboards_find_what_they_ask_for(server: Server) -> None:
    generate(server, "so that times of a request are counted")
    text = get(server, "/metrics").text
    values = dict(re.findall(r'^([\w:]+){(?:model_name="demo"|.*le="\+Inf",.*)} (\S+)$', text, re.MULTILINE))
    names = set(re.findall(r"^([\w:]+){", text, re.MULTILINE))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for panel in panels for one in panel["targets"] for name in re.findall(r"minisgl:\w+", one["expr"])}
    asked |= {f"vllm:{name}" for name in VLLM_DASHBOARD.split()} | {
        f"sglang:{name}" for name in SGLANG_DASHBOARD.split()
    }
    assert len(asked) > 30
    assert asked <= names
    for phase in ("queue", "prefill", "decode"):
        assert float(values[f"vllm:request_{phase}_time_seconds_count"]) > 0
    loads = get(server, "/v1/loads").json()["loads"]
    assert [load["max_total_num_tokens"] for load in loads] == [float(values["sglang:max_total_num_tokens"])] == [320]

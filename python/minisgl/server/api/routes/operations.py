"""Routes for operators: health, versions, counts of all processes, metrics; /flush_cache and /abort."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl import __version__
from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import FlushCache, Flushed, TextOptions
from minisgl.message.to_tokenizer import IdsPrompt
from minisgl.sampling_params import InvalidRequest, SamplingParams
from minisgl.server.api.bodies.route_bodies import AbortBody
from minisgl.server.api.http.errors import no_answer, overloaded, shutting_down, unhealthy
from minisgl.server.api.prometheus import CONTENT_TYPE, Exposition
from minisgl.server.api.requests.open_request import Job
from minisgl.server.api.routes.endpoint import Endpoint, Routes, json_response

SERVER_INFO_TIMEOUT = 2.0  # seconds, for the answers of all processes
GENERATE_TIMEOUT = 30.0  # seconds, for one token
FLUSH_TIMEOUT = 60.0  # seconds, for a scheduler in the middle of a step


class StatusRoutes(Routes):
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/health", self.health, answers=(dict[str, str],)),
            Endpoint("/ping", self.health, ("GET", "POST"), answers=(dict[str, str],)),  # for hosting services
            Endpoint("/ready", self.ready, answers=(dict[str, str],)),
            Endpoint("/health_generate", self.health_generate),
            Endpoint("/version", self.version, answers=(dict[str, str],)),
            Endpoint("/server_info", self.server_info),
            Endpoint("/get_server_info", self.server_info),  # SGLang's
            Endpoint("/metrics", self.metrics, answers=(str,), media_type="text/plain"),
        ]

    async def health(self, _request: Request) -> Response:
        """Answer 200 while every process that requests pass through answers heartbeats."""
        self._check_health()
        return json_response({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """Answer 200 while the server is healthy and has room for a request."""
        self._check_health()
        if not self._service.client.has_room:
            raise overloaded(self._service.config.http.max_queued_requests)
        return json_response({"status": "ready"})

    def _check_health(self) -> None:
        service = self._service
        if service.client.is_shut_down:
            raise shutting_down(None)
        if service.heartbeat.age > service.config.http.health_timeout:
            raise unhealthy(service.heartbeat.age)

    async def health_generate(self, _request: Request) -> Response:
        """Generate one token, ahead of all waiting requests."""
        begin = time.perf_counter()
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        job = Job(sampling, TextOptions(), 2**31 - 1, prompts=[IdsPrompt(pack_ids([0]))])
        try:
            async with asyncio.timeout(GENERATE_TIMEOUT):
                with self._service.client.open(job) as request:
                    await request.complete()
        except TimeoutError:
            raise no_answer(GENERATE_TIMEOUT) from None
        return json_response({"status": "ok", "seconds": time.perf_counter() - begin})

    async def version(self, _request: Request) -> Response:
        """Return the server's version."""
        return json_response({"version": __version__})

    async def server_info(self, _request: Request) -> Response:
        """Return the configuration, limits and every process's counts, and the keys of SGLang that routers read.

        `complete` is false if a process did not answer in time.
        """
        service = self._service
        processes, complete = await service.client.query_counts(SERVER_INFO_TIMEOUT)
        http = service.config.http
        http = msgspec.structs.replace(
            http, api_keys=("***",) * len(http.api_keys), admin_api_key=http.admin_api_key and "***"
        )
        return json_response(
            {
                "version": __version__,
                "model": service.config.model_name,
                "limits": service.limits,
                "config": msgspec.structs.replace(service.config, http=http),
                "complete": complete,
                "processes": {process.process: process.counts for process in processes},
                **self._sglang_info(),
            }
        )

    def _sglang_info(self) -> dict[str, object]:
        """Return the keys of SGLang's answer that apply to this server."""
        service, config = self._service, self._service.config
        engine = config.engine
        kv_events = config.kv_events and config.kv_events.describe(engine.page_size)
        return {
            "status": "ready",
            "model_path": engine.model_path,
            "served_model_name": config.model_name,
            "tokenizer_path": str(config.tokenizer_folder),
            "tp_size": engine.tp_size,
            "dp_size": 1,
            "pp_size": 1,
            "page_size": engine.page_size,
            "context_length": service.limits.max_seq_len,
            "max_running_requests": engine.max_running_requests,
            "max_total_num_tokens": service.load().max_tokens,
            "chunked_prefill_size": config.scheduler.max_prefill_tokens,
            "schedule_policy": config.scheduler.schedule_policy,
            "disaggregation_mode": "null",
            **({} if kv_events is None else {"kv_events": kv_events}),
            "internal_states": [{"last_gen_throughput": service.heartbeat.generation_rate}],
        }

    async def metrics(self, _request: Request) -> Response:
        """Return metrics as Prometheus text. The engine's counts are those of the last heartbeat."""
        service = self._service
        config, requests, counts = service.config, service.client.metrics, service.heartbeat.scheduler_counts
        text = Exposition(config.model_name, requests, service.load(), counts, config.engine.page_size).text()
        return Response(text, headers={"content-type": CONTENT_TYPE})


class ControlRoutes(Routes):
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/flush_cache", self.flush_cache, ("GET", "POST")),
            Endpoint("/reset_prefix_cache", self.flush_cache, ("POST",)),  # vLLM's
            Endpoint("/abort", self.abort, ("POST",), (AbortBody,), (dict[str, int],)),
            Endpoint("/abort_request", self.abort, ("POST",), (AbortBody,), (dict[str, int],)),  # SGLang's
        ]

    async def flush_cache(self, _request: Request) -> Response:
        """Forget every cached prefix that no running request uses."""
        reply = await self._service.client.ask(FlushCache, Flushed, FLUSH_TIMEOUT)
        return json_response({"success": True, "pages": reply.pages})

    async def abort(self, request: Request) -> Response:
        """End requests by id (the answer's id, or its x-request-id), or all; return how many there were."""
        body = await self._service.parse(request, AbortBody)
        if body.all or body.abort_all:
            return json_response({"aborted": self._service.client.abort_all()})
        ids = [*body.request_ids, *filter(None, (body.request_id, body.rid))]
        if not ids:
            raise InvalidRequest("request_id", "request_id, request_ids or all must be given")
        return json_response({"aborted": sum([self._service.client.abort(name) for name in ids])})

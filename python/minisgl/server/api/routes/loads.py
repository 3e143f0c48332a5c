"""Reports for routers that balance load: SGLang's /v1/loads, /get_loads and /get_load, vLLM's /load.

The engine's counts are those of the last heartbeat, as in /metrics: a poll costs the engine nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl import __version__
from minisgl.server.api.routes.endpoint import Endpoint, Routes, json_response


class RankLoad(msgspec.Struct, frozen=True):
    """Load of the one data-parallel rank, with SGLang's field names. Times are seconds."""

    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int  # tokens of the KV cache that running sequences hold
    num_total_tokens: int  # num_used_tokens and the known tokens of waiting sequences
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float  # tokens/s between the last two heartbeats
    cache_hit_rate: float  # since the start
    utilization: float  # share of slots or KV cache in use, whichever is larger
    dp_rank: int = 0


class Loads(msgspec.Struct, frozen=True):
    timestamp: str
    version: str
    num_accelerators: int
    loads: list[RankLoad]


class SimpleLoad(msgspec.Struct, frozen=True):
    """SGLang's older form of the report."""

    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    dp_rank: int = 0


class ServerLoad(msgspec.Struct, frozen=True):
    """Number of HTTP requests that are being answered, in vLLM's form."""

    server_load: int


class LoadRoutes(Routes):
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/v1/loads", self.loads, answers=(Loads,)),
            Endpoint("/get_loads", self.loads, answers=(Loads,)),
            Endpoint("/get_load", self.simple_load, answers=(list[SimpleLoad],)),
            Endpoint("/load", self.server_load, answers=(ServerLoad,)),  # vLLM's
        ]

    async def loads(self, _request: Request) -> Response:
        """Return running and waiting sequences, and tokens in use, in SGLang's form."""
        now, load, engine = datetime.now(UTC), self._service.load(), self._service.config.engine
        rank = RankLoad(
            now.timestamp(),
            load.running,
            load.waiting,
            load.tokens_used,
            load.tokens_used + load.tokens_waiting,
            load.max_tokens,
            engine.max_running_requests,
            load.usage,
            load.generation_rate,
            load.hit_rate,
            max(load.usage, load.running / engine.max_running_requests),
        )
        return json_response(Loads(now.isoformat(), __version__, engine.tp_size, [rank]))

    async def simple_load(self, _request: Request) -> Response:
        """Return the number of sequences and their tokens, in SGLang's older form."""
        load = self._service.load()
        tokens = load.tokens_used + load.tokens_waiting
        return json_response([SimpleLoad(load.running + load.waiting, load.waiting, tokens)])

    async def server_load(self, _request: Request) -> Response:
        """Return the number of HTTP requests that are being answered."""
        return json_response(ServerLoad(self._service.client.num_open))

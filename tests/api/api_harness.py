"""A real server on a real socket, in a thread, with the scripted engine behind it, and a client of raw bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import httpx
import openai
import zmq
from fake_engine import LIMITS, FakeEngine, wait_until

from minisgl.config import EngineConfig, HttpConfig, ServerConfig
from minisgl.message.socket import Addresses, Inbox, Outbox
from minisgl.message.to_api import ToApi
from minisgl.message.to_tokenizer import ToTokenizer
from minisgl.parsers.parser_choice import Parsers
from minisgl.server.api.answers.writer_thread import WriterThread
from minisgl.server.api.api_process import receive_forever
from minisgl.server.api.app import build_app
from minisgl.server.api.http.drain import DrainState
from minisgl.server.api.http.errors import shutting_down
from minisgl.server.api.http.server import Server
from minisgl.server.api.requests.engine_client import EngineClient, Heartbeat
from minisgl.server.api.responses.store import open_store
from minisgl.server.api.routes.service import Service

MODEL = "test-model"


def make_config(**changes: Any) -> ServerConfig:
    http = {name: changes.pop(name) for name in HttpConfig.__struct_fields__ if name in changes}
    http.setdefault("health_timeout", 86_400.0)  # most servers of the tests have no heartbeat
    engine = EngineConfig(model_path="/models/test")
    return ServerConfig(engine=engine, http=HttpConfig(**http), **{"model_names": (MODEL,), **changes})


def listening_socket() -> socket.socket:
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio does not set TCP_NODELAY
    sock.bind(("127.0.0.1", 0))
    return sock


# Making a client reads the certificates of the world, which takes longer than most tests.


@cache
def _http() -> httpx.Client:
    return httpx.Client(verify=False, trust_env=False, timeout=120)


@cache
def _sdk() -> openai.OpenAI:
    return openai.OpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=120)


class RunningServer:
    """The API server of `api_process.serve`, without the process."""

    def __init__(
        self,
        config: ServerConfig,
        engine: FakeEngine,
        run_dir: str,
        *,
        beats: bool = False,
        listener: socket.socket | None = None,
    ) -> None:
        self.config, self.engine, self._beats = config, engine, beats
        self._addresses = Addresses(run_dir)
        self._socket = listener or listening_socket()
        self.port: int = 0 if self._socket.family == socket.AF_UNIX else self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self.drained = threading.Event()  # every request that came before a drain is answered
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(120)
        wait_until(lambda: self._server.started)

    async def _main(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox = Inbox[ToApi](context, self._addresses.api, ToApi)
        outboxes = [
            Outbox[ToTokenizer](context, self._addresses.tokenizer(i)) for i in range(self.config.num_tokenizers)
        ]
        self.client = EngineClient(outboxes, self.config.http.max_queued_requests)
        heartbeat = Heartbeat(self.client)
        parsers = Parsers.choose(self.config.tool_call_parser, self.config.reasoning_parser, ())
        self.drain = DrainState()
        limits = self.config.http.limits(LIMITS)
        self.writer_thread = WriterThread()
        responses = open_store(self.config.http)
        service = Service(self.client, heartbeat, self.config, limits, parsers, responses, self.writer_thread)
        self.app = build_app(service, self.drain)
        self._server = Server(self.app, self.config.http, self.drain, self.client.metrics)
        self._loop = asyncio.get_running_loop()
        receiver = asyncio.create_task(receive_forever(inbox, self.client))
        beating = asyncio.create_task(heartbeat.beat_forever() if self._beats else asyncio.sleep(0))
        draining = asyncio.create_task(self._server.drain(self.drained.set))
        self._started.set()
        await self._server.serve(sockets=[self._socket])
        receiver.cancel()
        beating.cancel()
        draining.cancel()
        context.destroy(linger=0)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call on the server's event loop."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(120)

    def wait_for(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Await on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(function(), self._loop).result(120)

    def write_in_thread(self, write: Callable[[], bytes]) -> Future[bytes]:
        """Occupy the writer thread with a large answer."""
        return asyncio.run_coroutine_threadsafe(self.writer_thread.write(write, is_large=True), self._loop)

    def end(self, reason: str) -> None:
        """End as the process does when the supervisor says Shutdown."""

        def shut_down() -> None:
            self.client.shut_down(reason)
            self._server.end(shutting_down(reason))

        self.call(shut_down)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(120)
        assert not self._thread.is_alive()

    # Clients.

    @property
    def sdk(self) -> openai.OpenAI:
        return _sdk().with_options(base_url=f"{self.url}/v1")

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return _http().post(self.url + path, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return _http().get(self.url + path, **kwargs)

    def stream(self, path: str, **kwargs: Any) -> AbstractContextManager[httpx.Response]:
        return _http().stream("POST", self.url + path, **kwargs)

    def counts(self) -> dict[str, int]:
        return self.client.counts().counts

    def assert_idle(self) -> None:
        """Nothing of any request is left."""
        names = ("open_requests", "open_sequences", "open_prompts", "open_queries", "held_logprobs")
        wait_until(lambda: not any(self.counts()[name] for name in names))


class RawClient:
    """A client that can be rude: half a request, no reading, sudden ends."""

    def __init__(self, address: int | str, receive_buffer: int | None = None) -> None:
        """`address`: a port, or the path of a Unix domain socket."""
        self.socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(120)
        self.socket.connect(address if isinstance(address, str) else ("127.0.0.1", address))

    def post(self, path: str, body: dict[str, Any], *, cut: int = 0) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data[: len(data) - cut])

    def read_until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            received = self.socket.recv(65536)
            assert received, data
            data += received
        return data

    def read_all(self) -> bytes:
        data = bytearray()
        while received := self.socket.recv(2**20):
            data += received
        return bytes(data)

    def leave(self, *, reset: bool = False) -> None:
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

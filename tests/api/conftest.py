"""A real server on a real socket, in a thread, with the scripted engine behind it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zmq
from fake_engine import LIMITS, FakeEngine, wait_until

from minisgl.config import EngineConfig, ServerConfig
from minisgl.message.socket import Addresses, Outbox
from minisgl.message.to_tokenizer import ToTokenizer
from minisgl.server.api.app import build_app
from minisgl.server.api.client import EngineClient
from minisgl.server.api.process import Server, open_inbox, receive_forever

MODEL = "test-model"


def make_config(**changes: Any) -> ServerConfig:
    return ServerConfig(engine=EngineConfig(model_path="/models/test"), model_name=MODEL, **changes)


def listening_socket() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


class RunningServer:
    """The API server of `process.serve`, without the process."""

    def __init__(self, config: ServerConfig, engine: FakeEngine, run_dir: str) -> None:
        self.config, self.engine = config, engine
        self._addresses = Addresses(run_dir)
        self._socket = listening_socket()
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(5)
        wait_until(lambda: self._server.started)

    async def _main(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox = open_inbox(context, self._addresses)
        outboxes = [
            Outbox[ToTokenizer](context, self._addresses.tokenizer(i)) for i in range(self.config.num_tokenizers)
        ]
        self.client = EngineClient(outboxes, self.config.max_queued_sequences)
        self._server = Server(build_app(self.client, self.config, LIMITS))
        self._loop = asyncio.get_running_loop()
        receiver = asyncio.create_task(receive_forever(inbox, self.client))
        self._started.set()
        await self._server.serve(sockets=[self._socket])
        receiver.cancel()
        context.destroy(linger=0)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call on the server's event loop."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(5)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(5)
        assert not self._thread.is_alive()

    # Clients.

    @property
    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=10)

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=10, trust_env=False, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10, trust_env=False, **kwargs)

    def counts(self) -> dict[str, int]:
        return self.client.counts().counts

    def assert_idle(self, timeout: float = 2.0) -> None:
        """Nothing of any request is left."""
        names = ("open_requests", "open_sequences", "open_queries")
        wait_until(lambda: not any(self.counts()[name] for name in names), timeout)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    with ExitStack() as stack:

        def start(*, tick: float = 0.0005, **changes: Any) -> RunningServer:
            config = make_config(**changes)
            run_dir = str(tmp_path)
            engine = FakeEngine(run_dir, config.num_tokenizers, tick)
            engine.start()
            stack.callback(engine.stop)
            server = RunningServer(config, engine, run_dir)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server()

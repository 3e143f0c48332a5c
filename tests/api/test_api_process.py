"""The real process: started, served from and ended as the supervisor does it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_harness import MODEL, RawClient, listening_socket, make_config
from api_sse import parse_events
from fake_engine import LIMITS, FakeEngine, answer, wait_until

from minisgl.message.control import (
    ControlPipe,
    Drain,
    Drained,
    Failed,
    Phase,
    Ready,
    Serve,
    Shutdown,
    Start,
    ToSupervisor,
)
from minisgl.message.to_tokenizer import Generate

ENTRY = "minisgl.server.api.api_process:run"
STREAM = {"prompt": "endless", "stream": True}


class Process:
    """An API server process, and the supervisor's end of its control pipe."""

    def __init__(self, run_dir: str) -> None:
        self.listener = listening_socket()
        self.port: int = self.listener.getsockname()[1]
        ours, theirs = socket.socketpair()
        ours.settimeout(120)
        command = [sys.executable, "-m", "minisgl.process.worker", ENTRY, str(theirs.fileno())]
        fds = (theirs.fileno(), self.listener.fileno())
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths}
        self.popen = subprocess.Popen(command, pass_fds=fds, env=environment, stderr=subprocess.PIPE)
        theirs.close()
        self.pipe: ControlPipe[ToSupervisor] = ControlPipe(ours, ToSupervisor)  # type: ignore[arg-type]
        self.pipe.send(Start(make_config(), run_dir, os.getpid(), 0, self.listener.fileno()))
        assert isinstance(self.pipe.receive(), Phase)
        assert self.pipe.receive() == Ready()

    def serve(self) -> None:
        self.pipe.send(Serve(LIMITS))

        def is_connected() -> bool:
            try:
                return bool(self.get("/server_info")["complete"])
            except httpx.ConnectError:
                return False

        wait_until(is_connected)

    def get(self, path: str) -> dict[str, Any]:
        with httpx.Client(verify=False, trust_env=False, timeout=120) as http:
            return http.get(f"http://127.0.0.1:{self.port}{path}").json()  # type: ignore[no-any-return]

    def end(self) -> int:
        """Wait for its end; return its exit code."""
        return self.popen.wait(120)

    def errors(self) -> str:
        """Return what the ended process wrote to stderr."""
        assert self.popen.stderr is not None
        return self.popen.stderr.read().decode()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stderr is not None
        self.popen.stderr.close()
        self.pipe.close()
        self.listener.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(str(tmp_path))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def process(tmp_path: Path, engine: FakeEngine) -> Iterator[Process]:
    process = Process(str(tmp_path))
    yield process
    process.kill()


def test_the_process_serves_once_all_workers_are_ready(process: Process) -> None:
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", process.port))
    process.serve()
    client = RawClient(process.port)
    client.post("/v1/completions", {"prompt": "hello", "max_tokens": 5, "model": MODEL})
    assert json.dumps(answer("hello", 0, 5), ensure_ascii=False).encode() in client.read_all()


def test_shutdown_tells_every_client_and_ends_although_one_takes_nothing(process: Process, engine: FakeEngine) -> None:
    process.serve()
    streaming, whole, idle, deaf = (RawClient(process.port) for _ in range(4))
    streaming.post("/v1/completions", STREAM)
    head = streaming.read_until(b"data: ")
    whole.post("/v1/completions", {"prompt": "hold"})
    deaf.post("/v1/completions", {"prompt": "big", "stream": True, "max_tokens": 400})
    engine.wait_for(Generate, 3)
    time.sleep(0.1)
    process.pipe.send(Shutdown("the scheduler has died"))
    body = (head + streaming.read_all()).decode()
    assert '{"error":{"message":"the server is shutting down: the scheduler has died"' in body
    assert body.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b" 503 " in (answered := whole.read_all())
    assert b"the scheduler has died" in answered
    assert idle.read_all() == b""
    assert process.end() == 0
    assert all(" 127.0.0.1 " in line for line in process.errors().splitlines()), "no more than the access log"


def test_shutdown_of_an_idle_server_waits_for_nothing(process: Process) -> None:
    process.serve()
    process.pipe.send(Shutdown(grace=86_400.0))
    assert process.end() == 0


def test_a_drain_says_when_all_are_answered(process: Process, engine: FakeEngine) -> None:
    process.serve()
    client = RawClient(process.port)
    client.post("/v1/completions", STREAM)
    client.read_until(b"data: ")
    process.pipe.send(Drain())
    wait_until(lambda: process.get("/health").get("error", {}).get("code") == "shutting_down")
    assert process.get("/server_info")["processes"]["api"]["open_requests"] == 1
    httpx.post(f"http://127.0.0.1:{process.port}/abort", json={"all": True}, trust_env=False, timeout=120)
    assert b"request_aborted" in client.read_all()
    assert process.pipe.receive() == Drained()
    process.pipe.send(Shutdown(grace=86_400.0))
    assert process.end() == 0


def test_the_process_ends_with_its_parent_and_says_so_to_its_clients(process: Process) -> None:
    process.serve()
    client = RawClient(process.port)
    client.post("/v1/completions", STREAM)
    client.read_until(b"data: ")
    process.pipe.close()
    assert b"the server is shutting down: the supervisor died" in client.read_all()
    assert process.end() == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_the_supervisors_to_handle(process: Process, signum: int) -> None:
    """Both may go to the whole group: Ctrl-C does, and so does what ends a service."""
    process.serve()
    process.popen.send_signal(signum)
    time.sleep(0.1)
    assert process.get("/health")
    process.pipe.close()
    assert process.end() == 0


def test_a_message_it_does_not_know_ends_it(process: Process, engine: FakeEngine) -> None:
    """A process that ignored the message could leave a request without an answer. Waiting clients get an error."""
    process.serve()
    client = RawClient(process.port)
    client.post("/v1/completions", STREAM)
    client.read_until(b"data: ")
    engine.say({"type": "Nonsense"})  # type: ignore[arg-type]
    assert isinstance(failed := process.pipe.receive(), Failed)
    assert "Nonsense" in failed.message
    process.pipe.send(Shutdown("the process api has failed", grace=86_400.0))
    assert b"the process api has failed" in client.read_all()
    assert process.end() == 1


def test_the_process_streams(process: Process) -> None:
    process.serve()
    with httpx.Client(verify=False, trust_env=False, timeout=120) as http:
        url = f"http://127.0.0.1:{process.port}/generate"
        text = http.post(url, json={"prompt": "x", "stream": True, "max_tokens": 30}).text
    assert "".join(event["text"] for event in parse_events(text)) == answer("x", 0, 30)


def test_answers_do_not_wait_for_acknowledgements(process: Process) -> None:
    """Nagle's algorithm and delayed acknowledgements together cost 40 ms an answer."""
    process.serve()
    assert process.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "connections inherit it"


def test_no_torch_no_transformers() -> None:
    """A careless import would cost every API server seconds and hundreds of megabytes."""
    code = """
import sys
import minisgl.server.api.api_process
heavy = {"torch", "transformers", "tokenizers", "safetensors", "fastapi_offline"}
print(sorted(heavy & sys.modules.keys()))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"

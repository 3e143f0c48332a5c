"""The listening socket: a Unix domain socket has a file, which is never in the way and is not left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from openai import OpenAI

from minisgl.cli import parse_args
from minisgl.config import ConfigError
from minisgl.server import listener
from minisgl.server.listener import bind, bind_unix
from support.server import PATIENCE, Server, wait_until

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(autouse=True)
def _private_files() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def client_of(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE)


def run_to_refusal(path: Path) -> str:
    command = [sys.executable, "-m", "minisgl", "--model", "demo", "--uds", str(path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_a_server_is_reached_through_its_socket_alone(tmp_path: Path) -> None:
    """Hosts have any name: no web page reaches the socket. `--host` and `--port` have no effect, as in vLLM."""
    path = tmp_path / "server.sock"
    with Server("--model", "demo", "--uds", str(path), "--host", "127.0.0.1") as server:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o750, "as the umask says"
        with client_of(path) as http:
            sdk = OpenAI(base_url="http://any.name/v1", api_key="none", http_client=http, max_retries=0)
            assert sdk.chat.completions.create(**CHAT).usage.completion_tokens == 4  # type: ignore[call-overload]
            stream = sdk.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
            assert http.get("http://localhost/server_info").json()["config"]["uds"] == str(path)
        assert run_to_refusal(path).startswith(f"minisgl: error: cannot listen on {path}: Address already in use")
        with client_of(path) as http:
            assert http.get("http://localhost/health").status_code == 200, "the refused server left the file alone"
        server.end()
        assert server.process.returncode == 0
        assert any(" - POST /v1/chat/completions 200 " in line for line in server.log), server.log
    assert not list(tmp_path.iterdir())


def test_a_port_is_free_again_as_soon_as_its_server_has_ended() -> None:
    """The kernel remembers connections that the server has closed for a minute."""
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = first.accept()
        accepted.close()
        first.close()
        assert client.recv(1) == b""
    bind("127.0.0.1", port).close()


def test_the_file_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with Server("--model", "demo", "--uds", str(path)) as server:
        server.end(signal.SIGKILL)
        assert path.is_socket()
        wait_until(lambda: not list(Path(server.tmp).iterdir()))
    with Server("--model", "demo", "--uds", str(path)), client_of(path) as http:
        assert http.get("http://localhost/health").status_code == 200
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_left_behind", [False, True])
def test_of_two_servers_that_start_at_once_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left_behind: bool
) -> None:
    path = tmp_path / "server.sock"
    if is_left_behind:
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
    starts = ThreadPoolExecutor(1)
    others: list[Future[socket.socket]] = []

    class Slow(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            if not others:  # the first, whose file no server listens at yet
                others.append(starts.submit(bind_unix, str(path)))
                wait(others, 0.2)
            super().listen(backlog)

    monkeypatch.setattr(listener.socket, "socket", Slow)
    with bind_unix(str(path)) as first, socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(ConfigError, match="Address already in use"):
            others[0].result(PATIENCE)
        client.connect(str(path))
        first.accept()[0].close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EWOULDBLOCK])
def test_a_folder_whose_lock_cannot_be_had_does_not_prevent_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its file system has no locks, or another program keeps the lock."""
    waits: list[float] = []
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "")))
    monkeypatch.setattr(time, "sleep", waits.append)
    bind_unix(str(tmp_path / "server.sock")).close()
    assert sum(waits) == pytest.approx(1.0 if number == errno.EWOULDBLOCK else 0.0)


def test_a_start_that_fails_later_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    command = [sys.executable, "-m", "minisgl", "--model", "/no/such/folder", "--uds", str(path)]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=PATIENCE, check=False).returncode == 2
    assert not list(tmp_path.iterdir())


def test_files_of_others_stay(tmp_path: Path) -> None:
    """A socket whose listener is busy, a socket of another kind, an ordinary file, a link to a socket."""
    busy, datagrams, file, link = (tmp_path / name for name in ("busy", "datagrams", "file", "link"))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        listener.bind(str(busy))
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(str(busy))
        receiver.bind(str(datagrams))
        file.write_text("text")
        link.symlink_to("dead")
        for path in (busy, datagrams, file, link):
            with pytest.raises(ConfigError, match=r"already in use; choose another --uds$"):
                bind_unix(str(path))
            assert os.path.lexists(path)
        for one in waiting:
            one.close()


def test_a_path_that_no_socket_may_have_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # to open it would wait for its other end
    for path in (tmp_path / ("x" * 108), tmp_path / "no" / "folder", tmp_path / "fifo" / "x"):
        with pytest.raises(ConfigError, match=r"^cannot listen on .*; choose another --uds$"):
            bind_unix(str(path))
    for words in ("--uds=", "--uds x --shell"):
        with pytest.raises(ConfigError, match="--uds"):
            parse_args(["--model", "demo", *words.split()])

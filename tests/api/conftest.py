"""A server with a scripted engine for every test."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from api_harness import RunningServer, make_config
from fake_engine import FakeEngine


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server with these changes to its configuration.

    `tick` is the time of an engine's step in seconds; with `beats` the server has a heartbeat.
    """
    with ExitStack() as stack:

        def start(*, tick: float = 0.0005, beats: bool = False, listener: Any = None, **changes: Any) -> RunningServer:
            return _start(stack, tmp_path, tick, changes, beats=beats, listener=listener)

        yield start


@pytest.fixture(scope="module")
def _module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with ExitStack() as stack:
        yield _start(stack, tmp_path_factory.mktemp("run"), 0.0005, {"max_body_bytes": 4 * 1024 * 1024})


@pytest.fixture
def server(_module_server: RunningServer) -> Iterator[RunningServer]:
    """One server for all tests of a module, idle and forgetful before each and idle again after it."""
    _module_server.engine.received.clear()
    yield _module_server
    _module_server.assert_idle()


def _start(
    stack: ExitStack,
    run_dir: Path,
    tick: float,
    changes: dict[str, Any],
    *,
    beats: bool = False,
    listener: socket.socket | None = None,
) -> RunningServer:
    config = make_config(**changes)
    engine = FakeEngine(str(run_dir), config.num_tokenizers, tick)
    engine.start()
    stack.callback(engine.stop)
    server = RunningServer(config, engine, str(run_dir), beats=beats, listener=listener)
    stack.callback(server.stop)
    # By its answer all sockets are connected.
    server.wait_for(lambda: server.client.query_counts(120.0))
    return server

"""Values of --kv-events-config, and a publisher whose subscribers come, go and ask nonsense."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from minisgl.cli import parse_args
from minisgl.config import ConfigError
from minisgl.config.kv_events import KVEventsConfig
from minisgl.kvcache.radix import RadixCache
from minisgl.scheduler.kv_publisher import END, KVPublisher, open_socket

PAGE_SIZE = 4


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("{}", False),
        ('{"publisher": "zmq"}', True),
        ('{"publisher": "null"}', False),
        ('{"enable_kv_cache_events": true}', True),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', False),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', False),
    ],
)
def test_the_publisher_field_enables_events(text: str, published: bool) -> None:
    config = KVEventsConfig.parse(text)
    assert (config is not None) == published
    if config is not None:
        assert config.endpoint == "tcp://127.0.0.1:5557", "on loopback unless asked"
        assert config.binds


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", "object"),
        ("{", "truncated"),
        ('{"endpiont": "tcp://*:1"}', "endpiont"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm"),
        *(
            (json.dumps({"publisher": "zmq", "endpoint": f"tcp://{place}"}), "HOST:PORT")
            for place in ("*", "*:", "*:a", "*:²", "*:0", "*:65536", ":5557")
        ),
        ('{"publisher": "zmq", "replay_endpoint": "udp://x:1"}', "HOST:PORT"),
    ],
)
def test_invalid_configurations_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_args(["--kv-events-config", text])
    assert str(caught.value).startswith("--kv-events-config: ")


def test_without_a_cache_there_are_no_events() -> None:
    with pytest.raises(ConfigError, match="--cache radix"):
        parse_args(["--kv-events-config", '{"publisher": "zmq"}', "--cache", "naive"])


@pytest.mark.parametrize(
    ("endpoint", "binds", "described"),
    [
        ("tcp://*:5557", True, ("*", 5557)),
        ("tcp://127.0.0.2:5557", True, ("127.0.0.2", 5557)),
        ("tcp://[::1]:5557", True, ("[::1]", 5557)),
        ("tcp://collector:5557", False, None),
        ("ipc:///tmp/events", True, None),
    ],
)
def test_endpoints_are_bound_and_described(endpoint: str, binds: bool, described: Any) -> None:
    config = KVEventsConfig.parse(json.dumps({"publisher": "zmq", "endpoint": endpoint}))
    assert config is not None
    assert config.binds == binds
    block = config.describe(PAGE_SIZE)
    assert (block and (block["endpoint_host"], block["endpoint_port_base"])) == described


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_replay_begins_where_it_is_asked_to(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path / 'replay'}"
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path / 'events'}", replay_endpoint=replay, buffer_steps=3)
    publisher = KVPublisher(zmq.Context(), config, PAGE_SIZE)
    cache = RadixCache(PAGE_SIZE, publisher.recorder)
    for first in range(5):
        tokens = np.full(PAGE_SIZE, first, dtype=np.int32)
        cache.insert(tokens, np.array([first], dtype=np.int32), salt=b"secret" if first == 4 else b"")
        publisher.flush()
    publisher.flush()  # nothing happened: no batch
    client = context.socket(zmq.DEALER)
    client.set(zmq.RCVTIMEO, 120_000)
    client.connect(replay)

    def ask(start: bytes) -> list[tuple[int, Any]]:
        client.send_multipart((b"", start))
        found = []
        while (parts := client.recv_multipart())[1] != END:
            found.append((int.from_bytes(parts[1], "big"), msgspec.msgpack.decode(parts[2])))
        return found

    client.send_multipart((b"", b"short"))  # is passed over
    assert [number for number, _ in ask((0).to_bytes(8, "big"))] == [2, 3, 4], "the last three are kept"
    ((number, (_, (event,), rank)),) = ask((4).to_bytes(8, "big"))
    assert (number, rank, event["type"], event["token_ids"]) == (4, 0, "BlockStored", [4] * PAGE_SIZE)
    assert event["extra_keys"] == [[b"secret".hex()]]
    assert ask((5).to_bytes(8, "big")) == []
    with pytest.raises(ConfigError, match="cannot be bound"):
        KVPublisher(context, KVEventsConfig(endpoint="tcp://192.0.2.1:5557", bind=True), PAGE_SIZE)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_ipv6_endpoint_is_bound(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = context.socket(zmq.PUB)
    open_socket(publisher, "tcp://[::1]:*", bind=True)
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    assert endpoint.startswith("tcp://[::1]:")
    open_socket(context.socket(zmq.SUB), endpoint, bind=False)

"""Configuration of KV events: the JSON of --kv-events-config, with vLLM's and SGLang's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from minisgl.config.settings import ConfigError

_BIND_HOSTS = frozenset({"*", "0.0.0.0", "[::]", "::", "localhost", "[::1]"})
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Endpoints of KV events; events are published only if `publisher` or `enable_kv_cache_events` enables them."""

    enable_kv_cache_events: bool | None = None  # vLLM's field; SGLang has only `publisher`
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://127.0.0.1:5557"  # vLLM's and SGLang's default is tcp://*:5557, open to the network
    bind: bool | None = None  # None: bind loopback addresses, wildcards and ipc, connect to other hosts
    replay_endpoint: str | None = None  # always bound; None: no replay
    buffer_steps: _Count = 10_000  # batches kept for a replay
    hwm: _Count = 10_000  # batches kept for a slow subscriber, which misses later ones
    max_queue_size: _Count = 100_000  # accepted without effect: there is no queue before the socket
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig | None:
        """Return the configuration in the JSON, None if events are not enabled; ConfigError if it is invalid."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--kv-events-config: {error}") from None
        for endpoint in filter(None, (config.endpoint, config.replay_endpoint)):
            if not endpoint.startswith(("ipc://", "tcp://")) or (
                endpoint.startswith("tcp://") and _port(endpoint) is None
            ):
                raise ConfigError(f"--kv-events-config: {endpoint} must be tcp://HOST:PORT or ipc://PATH")
        asked = config.publisher == "zmq" if config.enable_kv_cache_events is None else config.enable_kv_cache_events
        return config if asked and config.publisher != "null" else None

    @property
    def binds(self) -> bool:
        """True if the publisher binds the endpoint, and subscribers connect to it."""
        host = _host(self.endpoint)
        wanted = self.endpoint.startswith("ipc://") or host in _BIND_HOSTS or host.startswith("127.")
        return wanted if self.bind is None else self.bind

    def describe(self, page_size: int) -> dict[str, Any] | None:
        """Return the `kv_events` block of SGLang's /server_info; None if subscribers cannot connect to the endpoint."""
        port = _port(self.endpoint)
        if port is None or not self.binds:
            return None
        block = {
            "publisher": "zmq",
            "endpoint_host": _host(self.endpoint),
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": page_size,
            "dp_size": 1,
        }
        replay_port = None if self.replay_endpoint is None else _port(self.replay_endpoint)
        return block if replay_port is None else {**block, "replay_endpoint_port_base": replay_port}


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0]


def _port(endpoint: str) -> int | None:
    text = endpoint.rpartition(":")[2]
    is_port = endpoint.startswith("tcp://") and text.isascii() and text.isdigit() and 0 < int(text) < 65536
    return int(text) if is_port and _host(endpoint) else None

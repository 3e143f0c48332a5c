"""Publisher of KV events over ZeroMQ, in vLLM's wire format, so that vLLM's subscribers can read them.

Each batch is a message of a PUB socket: topic, sequence number (8 bytes, big-endian), msgpack. A subscriber that missed
batches sends the first number that it wants to the replay ROUTER, and gets [number, msgpack] for each batch that is
still kept, then the number -1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from minisgl.config import ConfigError
from minisgl.config.kv_events import KVEventsConfig
from minisgl.kvcache.events import EventBatch, EventRecorder

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
REPLAY_SECONDS = 5.0  # for a subscriber to take a message of its replay, before the replay is given up


class KVPublisher:
    """Publishes the events of `recorder`; called by one thread. ConfigError for an endpoint that cannot be used."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: KVEventsConfig, page_size: int) -> None:
        self.recorder = EventRecorder(page_size)
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(config.hwm)
        open_socket(self._socket, config.endpoint, bind=config.binds)
        self._replay = None
        if config.replay_endpoint is not None:
            self._replay = Replay(context, config.replay_endpoint, config.buffer_steps)
        logger.info("KV events: %s", config.endpoint)

    def flush(self) -> None:
        """Publish the events since the last call as one batch, if there are any. A PUB socket never blocks."""
        events = self.recorder.take()
        if not events:
            return
        number = self._next.to_bytes(8, "big")
        payload = self._encoder.encode(EventBatch(time.time(), events))
        self._next += 1
        if self._replay is not None:
            self._replay.keep(number, payload)
        self._socket.send_multipart((self._topic, number, payload))


class Replay:
    """Keeps the last batches, and sends them to subscribers that ask, in a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, num_batches: int) -> None:
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=num_batches)
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a message that cannot be sent is an error, not dropped
        self._socket.set(zmq.SNDTIMEO, round(REPLAY_SECONDS * 1000))
        open_socket(self._socket, endpoint, bind=True)
        threading.Thread(target=self._serve, name="kv-replay", daemon=True).start()

    def keep(self, number: bytes, payload: bytes) -> None:
        with self._lock:
            self._batches.append((number, payload))

    def _serve(self) -> None:
        while True:
            request = self._socket.recv_multipart()
            if len(request) != 3 or request[1] or len(request[2]) != 8:
                logger.warning("a malformed request for a replay of KV events, in %d parts, is ignored", len(request))
                continue
            client, _, start = request
            with self._lock:
                batches = [batch for batch in self._batches if batch[0] >= start]  # big-endian: bytes in order
            try:
                for number, payload in (*batches, (END, b"")):
                    self._socket.send_multipart((client, b"", number, payload))
            except zmq.ZMQError as error:  # the subscriber has left, or takes nothing
                logger.warning("a replay of KV events was given up: %s", error)


def open_socket(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> None:
    """Bind or connect the socket; ConfigError if that fails."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, int(endpoint.startswith("tcp://[")))
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        what = "bound" if bind else "connected to"
        raise ConfigError(f"--kv-events-config: {endpoint} cannot be {what}: {error.strerror}") from None

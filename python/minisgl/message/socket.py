"""Typed ZeroMQ sockets: an inbox decodes one union of structs, an outbox encodes into another process's inbox.

Sends never block: queues are unbounded here, and admission in the API server bounds what can be in them. Sockets are
ipc:// files in a fresh directory that only the user can enter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Addresses:
    """Addresses of the processes' inboxes, inside the server's run directory."""

    def __init__(self, run_dir: str) -> None:
        self._dir = Path(run_dir)

    def _at(self, name: str) -> str:
        return f"ipc://{self._dir / name}.ipc"

    @property
    def api(self) -> str:
        return self._at("api")

    @property
    def scheduler(self) -> str:
        return self._at("scheduler")

    @property
    def detokenizer(self) -> str:
        return self._at("detokenizer")

    def rank(self, rank: int) -> str:
        """Return the address of the scheduler of a tensor-parallel rank above 0."""
        return self._at(f"rank-{rank}")

    @property
    def rendezvous(self) -> str:
        """Meeting place of tensor-parallel ranks (torch.distributed's init_method)."""
        return f"file://{self._dir / 'rendezvous'}"

    def tokenizer(self, index: int) -> str:
        return self._at(f"tokenizer-{index}")


def encode_array(array: object) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of an array: msgspec's encoder calls this for a type that it does not know.

    The dtype travels with the array, because a field's annotation cannot supply it: NumPy's aliases differ at run time
    from version to version.
    """
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"{type(array).__name__} does not go on the wire")
    return array.dtype.str, array.shape, array.tobytes()


def decode_array(_annotation: type, sent: Any) -> NDArray[Any]:
    """Return the array that `encode_array` sent, read-only: it lies in the bytes that were received."""
    dtype, shape, data = sent
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


class Inbox(Generic[T]):
    """The PULL socket of a process. On an event loop: wait for `fileno` to be readable, then drain it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, message_type: object) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=decode_array)

    def receive(self) -> T:
        """Wait for one message."""
        return self.decode(self.receive_data())

    def receive_data(self) -> bytes:
        """Wait for one message, and leave it encoded."""
        return self._socket.recv()

    def decode(self, data: bytes) -> T:
        return self._decoder.decode(data)

    def has_message(self, seconds: float) -> bool:
        """Wait so long for a message; return True if there is one."""
        return bool(self._socket.poll(round(seconds * 1000)))

    def fileno(self) -> int:
        """Return a descriptor that becomes readable once for new messages: `drain` to the end before waiting again."""
        return self._socket.fileno()

    def drain(self) -> Iterator[T]:
        """Yield the messages that have arrived, without waiting."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(data)


class Sender(Protocol[T_contra]):
    """Interface of an Outbox for the code that sends."""

    def send(self, message: T_contra, /) -> None: ...


class Outbox(Generic[T]):
    """A PUSH socket into one inbox. `send` queues and returns at once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)

    def send(self, message: T) -> None:
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; messages that were not sent yet are dropped. May be called repeatedly."""
        self._socket.close(linger=0)

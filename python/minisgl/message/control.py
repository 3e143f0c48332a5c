"""Supervisor <-> worker: one line of JSON a message on a stream socket pair.

The supervisor's end closing tells a worker that its parent is gone; a worker's end closing tells the supervisor that
the worker is.
"""

from __future__ import annotations

import select
import socket
import threading
from typing import Generic, TypeAlias, TypeVar

import msgspec

from minisgl.config import ServerConfig
from minisgl.limits import Limits

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to every worker."""

    config: ServerConfig
    run_dir: str
    index: int  # number among the workers of its kind, or the TP rank
    listen_fd: int | None = None  # the API server's listening socket, inherited
    name: str = ""  # name of the worker in logs


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Every worker is ready; these are the engine's limits."""

    limits: Limits


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests, finish those that are there, then say Drained. Only the API server is asked."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End now. With an error, tell it to the clients that wait."""

    error: str | None = None
    grace: float = 1.0  # seconds that the API server has to answer its clients


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Say how far you are. Only ranks are asked."""


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A phase of the worker's start has ended: its name, and the seconds it took."""

    text: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker can work; the scheduler says the limits."""

    limits: Limits | None = None


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Every request that came before Drain is answered."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to a Ping."""

    begun: int = 0  # steps that it has begun to launch
    finished: int = 0  # steps whose tokens it has read: rank 0 alone reads them all
    cpu_seconds: float = 0.0  # CPU time of its process, where steps run on the CPU


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot go on, in one line."""

    message: str


ToWorker: TypeAlias = Start | Serve | Drain | Ping | Shutdown
ToSupervisor: TypeAlias = Phase | Ready | Drained | Progress | Failed


class ControlPipe(Generic[T]):
    """One end of the socket pair. `T` is what this end receives."""

    def __init__(self, sock: socket.socket, receives: type[T]) -> None:
        self._socket = sock
        self._decoder = msgspec.json.Decoder(receives)
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send, from any thread, unless the other side is gone: its reader learns that by itself."""
        try:
            with self._sending:
                self._socket.sendall(self._encoder.encode(message) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self) -> T | None:
        """Wait for the next message; None when the other side has closed."""
        while b"\n" not in self._buffer:
            try:
                data = self._socket.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return self._decoder.decode(line)

    def receive_within(self, seconds: float) -> T | None:
        """Wait so long for the next message; None if there is none, or when the other side has closed."""
        if not self.has_buffered and not select.select([self._socket], [], [], seconds)[0]:
            return None
        return self.receive()

    @property
    def has_buffered(self) -> bool:
        """True if a whole message has been read from the socket already."""
        return b"\n" in self._buffer

    def close(self) -> None:
        self._socket.close()

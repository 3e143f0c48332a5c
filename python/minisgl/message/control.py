"""Messages between supervisor and workers, as lines of JSON on a stream socket pair.

When one end closes, the process at the other end knows that its peer is gone.
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
    owner: int  # process that removes run_dir; a worker does so if it is dead
    index: int  # number among the workers of its kind, or the TP rank
    listen_fd: int | None = None  # the API server's listening socket, inherited
    name: str = ""  # name of the worker in logs


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: every worker is ready, so begin to serve, with these limits of the engine."""

    limits: Limits


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to the API server: take no new requests, finish those under way, then send Drained."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Supervisor: end now. The API server answers waiting clients with the error, if any."""

    error: str | None = None
    grace: float = 1.0  # seconds that the API server has to answer its clients


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to a rank: answer with Progress."""


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Worker: a phase of its start has ended after so many seconds."""

    text: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker: ready to serve. The scheduler's message has the engine's limits."""

    limits: Limits | None = None


class Drained(msgspec.Struct, frozen=True, tag=True):
    """API server: every request that came before Drain is answered."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Rank: answer to a Ping."""

    begun: int = 0  # steps that the rank has begun to launch
    finished: int = 0  # steps whose tokens it has read; only rank 0 reads all
    cpu_seconds: float = 0.0  # CPU time of its process, if steps run on the CPU


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Worker: it has failed, for the reason in `message`, which is one line."""

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
        """Send a message, from any thread. Do nothing if the other side is gone, which the reader notices."""
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

    def receive_now(self) -> T | None:
        """Return the next message if it has come; None if there is none or the other side has closed."""
        if not self.has_buffered and not select.select([self._socket], [], [], 0)[0]:
            return None
        return self.receive()

    @property
    def has_buffered(self) -> bool:
        """True if a whole message has already been read from the socket."""
        return b"\n" in self._buffer

    def close(self) -> None:
        self._socket.close()

"""Start of every worker process: `python -m minisgl.process.worker ENTRY FD`.

ENTRY names a function ("package.module:function") that only this process imports; FD is its end of the control pipe.
A thread reads that pipe during the whole life of the process, so that a worker ends with its parent, however the parent
dies and whatever the worker is doing. The API server tells its clients before.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from minisgl.config import ConfigError, ServerConfig
from minisgl.error_text import in_one_line
from minisgl.limits import Limits
from minisgl.logs import configure_logging, set_up_logging
from minisgl.message.control import (
    ControlPipe,
    Drain,
    Drained,
    Failed,
    Phase,
    Ping,
    Progress,
    Ready,
    Serve,
    Shutdown,
    Start,
    ToWorker,
)
from minisgl.message.socket import Addresses
from minisgl.process.child import leave_signals_to_parent
from minisgl.process.run_dir import REMOVED


class Worker:
    """A worker's connection to its supervisor: its configuration, and the messages that it can send."""

    def __init__(self, pipe: ControlPipe[ToWorker]) -> None:
        self._pipe = pipe
        first = pipe.receive()
        if not isinstance(first, Start):
            raise RuntimeError(f"the control pipe began with {first!r}")
        self.config: ServerConfig = first.config
        configure_logging(self.config.log_level, self.config.log_format, first.name)
        self.index: int = first.index
        self.listen_fd: int | None = first.listen_fd
        self.addresses = Addresses(first.run_dir)
        self._run_dir = first.run_dir
        self._owner = first.owner
        self._serve: queue.SimpleQueue[Limits] = queue.SimpleQueue()
        self._on_drain: Callable[[], object] = self.drained
        self._progress: Callable[[], Progress] = Progress
        self._on_shutdown: Callable[[Shutdown], None] = lambda _shutdown: os._exit(0)
        threading.Thread(target=self._watch, name="control", daemon=True).start()

    def _watch(self) -> None:
        while (message := self._pipe.receive()) is not None:
            if isinstance(message, Serve):
                self._serve.put(message.limits)
            elif isinstance(message, Drain):
                self._on_drain()
            elif isinstance(message, Ping):
                self._pipe.send(self._progress())
            elif isinstance(message, Shutdown):
                self._on_shutdown(message)
        if self._is_orphan():
            self._remove_run_dir()
        try:
            self._on_shutdown(Shutdown("the supervisor died"))
        finally:
            os._exit(1)  # although its event loop may be closed

    def _is_orphan(self) -> bool:
        """Return True if the supervisor is dead. Its files are closed a moment before its children get a new parent."""
        for _ in range(20):
            if os.getppid() != self._owner:
                return True
            time.sleep(0.005)
        return False

    def _remove_run_dir(self) -> None:
        """Remove the folder as the first of the workers, so that none can create a file in it meanwhile."""
        removed = self._run_dir + REMOVED
        with suppress(OSError):  # another worker is the first
            os.rename(self._run_dir, removed)
            shutil.rmtree(removed, ignore_errors=True)

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Call `callback` from the control thread when a drain begins. Must be registered before `ready`."""
        self._on_drain = callback

    def on_ping(self, progress: Callable[[], Progress]) -> None:
        """Call `progress` from the control thread to answer a ping."""
        self._progress = progress

    def on_shutdown(self, callback: Callable[[Shutdown], None]) -> None:
        """Call `callback` from the control thread instead of exiting at once. The supervisor waits `grace` seconds."""
        self._on_shutdown = callback

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Report the seconds that a part of the start took."""
        begin = time.perf_counter()
        yield
        self._pipe.send(Phase(text, time.perf_counter() - begin))

    def ready(self, limits: Limits | None = None) -> Limits:
        """Report that this worker is ready; return the engine's limits when all are. The scheduler gives the limits."""
        self._pipe.send(Ready(limits))
        # Objects of the start are permanent. A collection that visits all of them would halt the scheduler for 40 ms.
        gc.collect()
        gc.freeze()
        return self._serve.get()

    def drained(self) -> None:
        """Report that every request that came before the drain is answered."""
        self._pipe.send(Drained())

    def failed(self, message: str) -> None:
        """Report in one line why this worker has failed."""
        self._pipe.send(Failed(in_one_line(message)))


def main(entry: str, fd: int) -> None:
    """Run one worker."""
    leave_signals_to_parent()
    set_up_logging()
    worker = Worker(ControlPipe(socket.socket(fileno=fd), ToWorker))  # type: ignore[arg-type]
    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(worker)
    except ConfigError as error:
        worker.failed(str(error))
        sys.exit(1)
    except Exception as error:
        worker.failed(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

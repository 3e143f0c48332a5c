"""Processes of the other tensor-parallel ranks of an LLM: they execute the plans of the caller's rank 0."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from minisgl.config import ConfigError, ServerConfig
from minisgl.distributed import TPGroup
from minisgl.limits import Limits
from minisgl.message.control import Failed, Ready, Serve, Start, ToSupervisor
from minisgl.message.socket import Addresses, Outbox
from minisgl.message.to_scheduler import ToRank
from minisgl.process.child import Child, start_worker
from minisgl.process.machine import cpu_environment, make_run_dir

_GRACE = 1.0  # seconds: a connection breaks before its process has ended


class RankLost(ConfigError, RuntimeError):
    """A rank's process has ended: at the start by what it says, later by itself."""


def _lost(child: Child, message: ToSupervisor | None = None) -> RankLost:
    """Return an error with what the process said at last, if anything."""
    while message is None or not isinstance(message, Failed):
        if (message := child.pipe.receive()) is None:
            return RankLost(f"{child.name}: it died")
    return RankLost(f"{child.name}: {message.message}")


def _abort_after(process: subprocess.Popen[bytes], group: TPGroup, closed: threading.Event) -> None:
    process.wait()
    if not closed.is_set():
        group.abort()


class RankProcesses:
    """Ranks 1 and up. They end when `close` closes their control pipes, or with the caller."""

    def __init__(self, config: ServerConfig) -> None:
        self._closed = threading.Event()
        self._run_dir = make_run_dir()
        self._remove_run_dir = weakref.finalize(self, shutil.rmtree, self._run_dir, ignore_errors=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.addresses = Addresses(self._run_dir)
        self._children: list[Child] = [
            start_worker(
                f"scheduler-{rank}",
                "minisgl.scheduler.process:run",
                Start(config, self._run_dir, rank),
                cpu_environment(os.environ),
            )
            for rank in range(1, config.engine.tp_size)
        ]

    def check(self) -> None:
        """Raise RankLost if one has ended."""
        for child in self._children:
            if child.process.poll() is not None:
                raise _lost(child)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raise RankLost in place of what a collective says of a rank that has ended."""
        try:
            yield
        except RankLost:
            raise
        except RuntimeError:
            deadline = time.monotonic() + _GRACE
            while self._children and time.monotonic() < deadline:
                self.check()
                time.sleep(0.01)
            raise

    def watch(self, group: TPGroup) -> None:
        """Abort the group's collectives as soon as one ends: NCCL would wait for it until the timeout."""
        for child in self._children:
            args = (child.process, group, self._closed)  # not self, whose end is theirs
            threading.Thread(target=_abort_after, args=args, name=f"watch {child.name}", daemon=True).start()

    def outboxes(self, limits: Limits) -> list[Outbox[ToRank]]:
        """Wait until all are ready, let them begin, and return where their plans go. Raises RankLost."""
        for child in self._children:
            while not isinstance(message := child.pipe.receive(), Ready):
                if message is None or isinstance(message, Failed):
                    raise _lost(child, message)
            child.pipe.send(Serve(limits))
        return [Outbox(self._context, self.addresses.rank(rank)) for rank, _ in enumerate(self._children, start=1)]

    def close(self) -> None:
        self._closed.set()
        for child in self._children:
            child.pipe.close()
            child.process.kill()
            child.process.wait()
        self._context.destroy(linger=0)
        self._remove_run_dir()

"""Processes of the other tensor-parallel ranks of an LLM: they execute the plans of the caller's rank 0."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from minisgl.config import ConfigError, ServerConfig
from minisgl.distributed import TPGroup
from minisgl.limits import Limits
from minisgl.message.control import Failed, Progress, Ready, Serve, Start, ToSupervisor
from minisgl.message.socket import Addresses, Outbox
from minisgl.message.to_scheduler import ToRank
from minisgl.process.child import Child, start_worker
from minisgl.process.hang_watch import PING_SECONDS, RankWatch
from minisgl.process.machine import cpu_environment
from minisgl.process.run_dir import RunDir

_GRACE = 1.0  # seconds for a rank's process to end after its connection has broken


class RankLost(ConfigError, RuntimeError):
    """A rank's process has failed or died, or it hung and was ended."""


def _abort_after(process: subprocess.Popen[bytes], group: TPGroup, closed: threading.Event) -> None:
    process.wait()
    if not closed.is_set():
        group.abort()


def _look_until(closed: threading.Event, ranks: weakref.ref[RankProcesses]) -> None:
    while not closed.wait(PING_SECONDS / 2) and (one := ranks()) is not None:
        one.look()
        del one  # no reference between two looks, so that the object can be freed


def _end(
    pid: int,
    children: list[Child],
    context: zmq.Context[zmq.Socket[bytes]],
    outboxes: list[Outbox[ToRank]],
    run_dir: RunDir,
    closed: threading.Event,
    reading: threading.RLock,
) -> None:
    """End the processes and free what they were reached by. A process that is forked from `pid` leaves them alone.

    Its finalizer holds the outboxes. Otherwise the garbage collector would free them in one cycle with the context,
    which would have lost its list of their sockets, and wait for them for ever.
    """
    if os.getpid() != pid:
        return
    closed.set()
    for child in children:
        with reading:
            child.pipe.close()
        child.process.kill()
        child.process.wait()
    for outbox in outboxes:
        outbox.close()
    context.destroy(linger=0)
    run_dir.remove()


class RankProcesses:
    """Ranks 1 and up. They end with `close`, when this object is freed, or with the caller."""

    def __init__(self, config: ServerConfig) -> None:
        self._closed = threading.Event()
        # Held while control pipes are read. The garbage collector may call `_end` meanwhile, in the same thread.
        self._reading = threading.RLock()
        self._failures: dict[str, str] = {}  # message of a failure, by process
        self._hang: str | None = None
        self._hang_timeout = config.engine.hang_timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._children: list[Child] = []
        self._outboxes: list[Outbox[ToRank]] = []
        run_dir = RunDir()
        held = os.getpid(), self._children, self._context, self._outboxes, run_dir, self._closed, self._reading
        self._end = weakref.finalize(self, _end, *held)
        self.addresses = Addresses(run_dir.path)
        for rank in range(1, config.engine.tp_size):
            start = Start(config, run_dir.path, os.getpid(), rank)
            child = start_worker(
                f"scheduler-{rank}", "minisgl.scheduler.process:run", start, cpu_environment(os.environ)
            )
            self._children.append(child)

    def check(self) -> None:
        """Raise RankLost if a rank's process has ended; it names one that was killed before any that failed."""
        if ended := self._ended():
            raise self._lost(min(ended, key=lambda child: child.process.returncode >= 0))

    def _ended(self) -> list[Child]:
        return [child for child in self._children if child.process.poll() is not None]

    def _lost(self, child: Child, message: ToSupervisor | None = None) -> RankLost:
        """Return an error with the process's message of its failure, if it sent one."""
        if self._hang is not None:
            return RankLost(self._hang)
        with self._reading:
            if child.name in self._failures:
                return RankLost(f"{child.name}: {self._failures[child.name]}")
            while message is None or not isinstance(message, Failed):
                if (message := child.pipe.receive()) is None:
                    return RankLost(f"{child.name}: it died")
        return RankLost(f"{child.name}: {message.message}")

    def _check_failures(self) -> None:
        """Raise RankLost if a rank has sent why it failed. Its process may take seconds to end after that."""
        with self._reading:
            for child in self._children:
                while (message := child.pipe.receive_now()) is not None:
                    if isinstance(message, Failed):
                        self._failures[child.name] = message.message
                if child.name in self._failures:
                    raise RankLost(f"{child.name}: {self._failures[child.name]}")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Replace the error of a collective by RankLost if a rank has ended or says that it failed."""
        try:
            yield
        except RankLost:
            raise
        except RuntimeError:
            deadline = time.monotonic() + _GRACE
            while self._children and time.monotonic() < deadline:
                self.check()
                self._check_failures()
                time.sleep(0.01)
            raise

    def watch(self, group: TPGroup) -> None:
        """Abort the group's collectives as soon as a rank ends: NCCL would wait for it until its timeout."""
        for child in self._children:
            args = (child.process, group, self._closed)  # not self, which the threads would keep alive
            threading.Thread(target=_abort_after, args=args, name=f"watch {child.name}", daemon=True).start()

    def watch_progress(self, progress: Callable[[], Progress]) -> None:
        """Watch for hangs from now on, when all ranks are ready. `progress` returns that of rank 0, in this process."""
        if not self._children or not self._hang_timeout:
            return
        self._progress = progress
        children = dict(enumerate(self._children, start=1))
        self._watch = RankWatch(children, len(children) + 1, self._hang_timeout)
        args = self._closed, weakref.ref(self)
        threading.Thread(target=_look_until, args=args, name="watch progress", daemon=True).start()

    def look(self) -> None:
        """Read the ranks' messages. If one hangs, end all, so that rank 0's collective fails and `check` says why."""
        with self._reading:
            if self._closed.is_set() or self._hang is not None or self._ended():
                return
            for child in self._children:
                while isinstance(message := child.pipe.receive_now(), Progress):
                    self._watch.answer(child.name, message)
                if isinstance(message, Failed):
                    self._failures[child.name] = message.message
            self._watch.answer_here(self._progress())
            self._hang = self._watch.look()
            if self._hang is not None:
                for child in self._children:
                    child.process.kill()

    def outboxes(self, limits: Limits) -> list[Outbox[ToRank]]:
        """Wait until all ranks are ready, start them, and return the outboxes for their plans. Raises RankLost."""
        for child in self._children:
            while not isinstance(message := child.pipe.receive(), Ready):
                if message is None or isinstance(message, Failed):
                    raise self._lost(child, message)
            child.pipe.send(Serve(limits))
        for rank, _ in enumerate(self._children, start=1):
            self._outboxes.append(Outbox(self._context, self.addresses.rank(rank)))
        return self._outboxes

    def end_if_lost(self) -> None:
        """End the other ranks if one has ended, because they wait for it, and leaving NCCL's group may wait for them.

        No `check` may follow: it could not tell any more which rank was the first.
        """
        if self._ended():
            self.kill()

    def kill(self) -> None:
        """Kill the processes, so that collectives that wait for them fail."""
        for child in self._children:
            child.process.kill()
            child.process.wait()

    def close(self) -> None:
        """End the processes and free what they were reached by. May be called repeatedly."""
        self._end()

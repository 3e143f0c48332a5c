"""The supervisor: the process that the user started. It launches the workers, watches them, and ends them.

The port is bound and the model's config is read before (`start`), so that a port in use and an unsupported model are
noticed before anything slow happens. A worker's death shows at once as the end of its control pipe.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping

import msgspec

from minisgl.config import ServerConfig
from minisgl.limits import Limits
from minisgl.message.control import Drain, Drained, Failed, Phase, Progress, Ready, Serve, Shutdown, Start, ToSupervisor
from minisgl.process.child import Child, start_worker
from minisgl.process.hang_watch import RankWatch
from minisgl.process.machine import cpu_environment
from minisgl.process.run_dir import RunDir
from minisgl.server.listener import url_of
from minisgl.server.signal_socket import SignalSocket
from minisgl.shell.shell_process import ShellProcess

logger = logging.getLogger(__name__)

ENTRIES: Mapping[str, str] = {  # entry point by kind of worker; only the worker imports it
    "scheduler": "minisgl.scheduler.process:run",
    "tokenizer": "minisgl.tokenizer.tokenizer_worker:run",
    "detokenizer": "minisgl.tokenizer.detokenizer_worker:run",
    "api": "minisgl.server.api.api_process:run",
}
GRACE_SECONDS = 0.9  # for the API server to answer its clients when the server ends without a drain
EXIT_SECONDS = 0.1  # from the end of a worker's grace to the end of its process
KILL_SECONDS = 0.3  # from there until workers that still run are killed
# Part of --shutdown-timeout in which clients are told that the time is up, and all processes end.
TEARDOWN_SECONDS = 3.0
# A second SIGTERM within this time is a duplicate: timeout(1) signals its child, then the child's group.
REPEAT_SECONDS = 0.5


class WorkerFailed(Exception):
    """A worker reported a failure, or died. `told` is the text for clients: it never has an exception's text."""

    def __init__(self, text: str, told: str = "") -> None:
        super().__init__(text)
        self.told = told or text


class Interrupted(Exception):
    """SIGINT, SIGTERM, SIGHUP, or the end of the shell."""


class Terminated(Interrupted):
    """SIGTERM alone: running requests may finish."""


class Supervisor:
    """Runs one server from start to end. ConfigError if there is no folder for its sockets."""

    def __init__(self, config: ServerConfig, listener: socket.socket, entries: Mapping[str, str] = ENTRIES) -> None:
        self._config = config
        self._entries = entries
        self._listener = listener
        self._signals = SignalSocket()  # first: a signal from here on still leads to `_clean_up`
        self._run_dir = RunDir()
        self._children: list[Child] = []
        self._ranks: RankWatch | None = None  # while serving
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ, None)
        self._shell: ShellProcess | None = None
        self._shell_end: int | None = None  # pidfd, readable once the shell has ended
        self._deadline = 0.0  # `time.monotonic` until which clients may read the rest of their answers after a drain

    def run(self) -> int:
        """Serve until interrupted or the shell ends (0), or until a worker fails (1)."""
        begin = time.perf_counter()
        scheme = "https" if self._config.http.ssl_certfile else "http"
        address, url = self._listener.getsockname(), url_of(self._listener, scheme)
        try:
            self._launch()
            cap = self._config.sampling_defaults.max_new_tokens
            self._tell_all(Serve(msgspec.structs.replace(self._wait_until_ready(), max_new_tokens=cap)))
            seconds = time.perf_counter() - begin
            logger.info("ready after %.1f s: %s on %s", seconds, self._config.model_name, url)
            if self._config.shell:
                self._open_shell(*address[:2])
            self._watch()
            self._drain()
            raise Interrupted
        except Interrupted:
            self._end_clients(error=None)
            logger.info("ending")
            return 0
        except WorkerFailed as error:
            failure = error
            self._end_clients(error=error.told)
        finally:
            self._clean_up()
        logger.error("%s", failure)  # the last line: no worker that is still there can log another after it
        return 1

    # --- start ------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        for rank in range(self._config.engine.tp_size):
            self._start(f"scheduler-{rank}", "scheduler", rank)
        for index in range(self._config.num_tokenizers):
            self._start(f"tokenizer-{index}", "tokenizer", index)
        self._start("detokenizer", "detokenizer")
        self._start("api", "api", listen_fd=self._listener.fileno())
        # The API server alone holds it from now on: when that ends, clients are refused instead of left to wait.
        self._listener.close()

    def _start(self, name: str, kind: str, index: int = 0, listen_fd: int | None = None) -> None:
        start = Start(self._config, self._run_dir.path, os.getpid(), index, listen_fd, name)
        env = cpu_environment(os.environ) if kind == "scheduler" else None
        child = start_worker(name, self._entries[kind], start, env)
        self._children.append(child)
        self._selector.register(child.pipe, selectors.EVENT_READ, child)

    def _wait_until_ready(self) -> Limits:
        limits: Limits | None = None
        while not all(child.ready for child in self._children):
            for child, message in self._messages():
                if isinstance(message, Phase):
                    logger.info("%s: %s, %.1f s", child.name, message.text, message.seconds)
                elif isinstance(message, Ready):
                    child.ready = True
                    limits = message.limits or limits
        if limits is None:
            raise WorkerFailed("no worker reported the engine's limits")
        return limits

    def _open_shell(self, host: str, port: int) -> None:
        """Give the terminal to the shell, in which Ctrl-C stops an answer and to which nothing else writes."""
        logging.getLogger().setLevel(logging.WARNING)
        keys = self._config.http.api_keys
        self._shell = ShellProcess(host, port, self._config.model_name, keys[0] if keys else None)
        self._shell_end = os.pidfd_open(self._shell.process.pid)
        self._selector.register(self._shell_end, selectors.EVENT_READ, None)

    # --- watch ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Return after SIGTERM."""
        size = self._config.engine.tp_size
        ranks = {rank: child for rank in range(size) for child in self._children if child.name == f"scheduler-{rank}"}
        self._ranks = RankWatch(ranks, size, self._config.engine.hang_timeout)
        try:
            while True:
                for child, message in self._messages():
                    logger.warning("%s said %r while serving", child.name, message)
        except Terminated:
            return

    def _drain(self) -> None:
        """Wait until every request is answered or the time is up. Raises Interrupted after another signal."""
        timeout = self._config.shutdown_timeout
        if not timeout:
            return
        begin = time.monotonic()
        deadline = begin + timeout
        until = deadline - min(TEARDOWN_SECONDS, timeout / 2)
        logger.info("draining for up to %g s; a second signal ends at once", timeout)
        if self._shell_end is not None:  # the end of the shell no longer matters
            self._selector.unregister(self._shell_end)
        next(child for child in self._children if child.name == "api").pipe.send(Drain())
        while (seconds := until - time.monotonic()) > 0:
            try:
                if any(isinstance(message, Drained) for _, message in self._messages(seconds)):
                    break
            except Terminated:
                if time.monotonic() - begin > REPEAT_SECONDS:
                    raise
        else:
            logger.warning("the time to finish is up: clients that still wait get an error")
        self._deadline = deadline

    def _messages(self, timeout: float | None = None) -> Iterator[tuple[Child, ToSupervisor]]:
        """Wait for messages of workers, up to `timeout` seconds, and yield them.

        Raises WorkerFailed when one fails, hangs or is gone, Interrupted after a signal or when the shell has ended.
        """
        if self._ranks is not None:
            if (hang := self._ranks.look()) is not None:
                raise WorkerFailed(hang, told=f"the process {hang.partition(':')[0]}")
            timeout = min((seconds for seconds in (timeout, self._ranks.pause) if seconds is not None), default=None)
        sources = self._selector.select(timeout)
        self._heed_signals()  # first: a signal to the whole process group ends workers without a failure
        for key, _ in sources:
            if key.fileobj == self._shell_end:
                raise Interrupted
            if key.fileobj is not self._signals:
                yield from self._received(key.data)

    def _heed_signals(self) -> None:
        signals = self._signals.receive()
        has_terminal = self._shell is None or self._shell.process.poll() is not None
        signals &= {signal.SIGTERM, signal.SIGHUP} | ({signal.SIGINT} if has_terminal else set())
        if signals:
            raise Terminated if signals == {signal.SIGTERM} else Interrupted

    def _received(self, child: Child) -> Iterator[tuple[Child, ToSupervisor]]:
        """Yield the messages that a worker has sent."""
        while True:
            message = child.pipe.receive()
            if message is None:
                raise WorkerFailed(self._death_message(child))
            if isinstance(message, Failed):
                text = f"{child.name}: {message.message}" if child.ready else message.message
                raise WorkerFailed(text, told=f"the process {child.name} has failed")
            if isinstance(message, Progress):
                if self._ranks is not None:
                    self._ranks.answer(child.name, message)
            else:
                yield child, message
            if not child.pipe.has_buffered:
                break

    def _death_message(self, child: Child) -> str:
        try:
            code = child.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"the process {child.name} closed its control pipe"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process {child.name} died ({how})"

    # --- end --------------------------------------------------------------------------------------------------

    def _tell_all(self, message: Serve | Shutdown) -> None:
        for child in self._children:
            child.pipe.send(message)

    def _grace(self) -> float:
        """Return the seconds that a process has to end by itself."""
        return max(GRACE_SECONDS, self._deadline - time.monotonic() - KILL_SECONDS - EXIT_SECONDS)

    def _end_clients(self, error: str | None) -> None:
        """Have the API server answer clients that still wait with `error`, and wait for its end.

        Then end the shell, before anything else is written to the terminal.
        """
        api = next((child for child in self._children if child.name == "api" and child.ready), None)
        if api is not None:
            grace = self._grace()
            api.pipe.send(Shutdown(error, grace))
            _wait(api.process, grace + EXIT_SECONDS)
        if self._shell is not None:
            self._shell.end(self._grace())

    def _clean_up(self) -> None:
        self._tell_all(Shutdown())
        deadline = time.monotonic() + KILL_SECONDS
        for child in self._children:
            _wait(child.process, deadline - time.monotonic())
            child.process.kill()
            child.process.wait()
            child.pipe.close()
        self._selector.close()
        self._signals.close()
        self._listener.close()
        self._run_dir.remove()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return

"""Starts the real server as a user would, on any free port, and checks that it leaves nothing when it ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

START_SECONDS = 300.0
PATIENCE = 120.0  # seconds to wait for what must come; a loaded machine may take that long


class Server:
    """A running server. Use it as a context manager.

    It is started as from a terminal, also where the tests run under nohup, which makes children ignore SIGHUP.
    `before` is a line of shell that comes first; `ignored` names a signal that the server inherits as ignored.
    """

    def __init__(self, *args: str, before: str = ":", ignored: str | None = None) -> None:
        # The key that our own questions carry, if the server wants one.
        self.api_key = args[args.index("--api-key") + 1] if "--api-key" in args else "none"
        # A run directory of our own, so that what is left in it can be seen.
        self.tmp = tempfile.mkdtemp(prefix="minisgl-test-")
        signals = ["--default-signal=HUP", *([f"--ignore-signal={ignored}"] if ignored else [])]
        command = ["env", *signals, sys.executable, "-m", "minisgl", "--port", "0", *args]
        self.process = subprocess.Popen(
            ["sh", "-c", f"{before} && exec {shlex.join(command)}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": self.tmp, "HF_HUB_OFFLINE": "1"},
        )
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if found := re.search(r"ready after .* on (http://[\w.:\[\]]+|unix:\S+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> Server:
        assert self._ready.wait(START_SECONDS), f"not ready: {self.log}"
        assert hasattr(self, "url"), f"the server ended: {self.log}"
        return self

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=180)

    def info(self) -> dict[str, dict[str, int]]:
        """Return the counts of what each process holds, once all have answered: the server waits 2 s for them."""
        headers = {"authorization": f"Bearer {self.api_key}"}
        answers: list[dict[str, Any]] = []

        def is_complete() -> bool:
            answers.append(httpx.get(f"{self.url}/server_info", headers=headers, timeout=PATIENCE).json())
            return bool(answers[-1]["complete"])

        wait_until(is_complete, lambda: str(answers[-1]))
        return answers[-1]["processes"]

    def wait_idle(self) -> None:
        """Wait until no process holds anything of any request, and every page is free or cached."""
        wait_until(lambda: is_idle(self.info()), lambda: str(self.info()))

    def end(self, signum: int = signal.SIGTERM) -> None:
        """Send a signal and wait until the process is gone."""
        self.process.send_signal(signum)
        self.wait()

    def wait(self) -> int:
        """Wait until the process is gone and its whole log has been read; return its exit status."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still there after {PATIENCE} s: {self.log}") from None
        self._reader.join(PATIENCE)
        return status

    def __enter__(self) -> Server:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end()
        assert not list(Path(self.tmp).iterdir()), "the run directory is left behind"
        os.rmdir(self.tmp)


def is_idle(processes: dict[str, dict[str, int]]) -> bool:
    scheduler = processes["scheduler-0"]
    pages = scheduler["pages_free"] + scheduler["pages_cached"] == scheduler["pages"]
    held = [
        count
        for process, counts in processes.items()
        for name, count in counts.items()
        if name.startswith(("sequences", "requests", "waiting", "open_sequences", "pages_locked", "pages_reserved"))
    ]
    return pages and not any(held)


def wait_until(condition: Callable[[], bool], describe: Callable[[], str] = str) -> None:
    """Wait for what must come. When it comes is no test's matter: machines differ, and may be busy."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {describe()}"
        time.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    """Return the time that a process has computed."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def worker_pids(parent: int) -> dict[str, int]:
    """The worker processes of a supervisor, by the name of their entry function's module; of equals, one."""
    return {module: pid for pid, module in worker_processes(parent)}


def worker_processes(parent: int) -> list[tuple[int, str]]:
    """The worker processes of a supervisor in the order of their start: pid and module of the entry function."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if int(status[1]) == parent and "minisgl.process.worker" in command:
            entry = command[command.index("minisgl.process.worker") + 1]
            pids.append((int(path.name), entry.partition(":")[0]))
    return sorted(pids)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

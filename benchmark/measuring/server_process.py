"""An OpenAI-compatible server as a child process: its start and end, what it serves, its workers and their CPU time."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

TICKS = os.sysconf("SC_CLK_TCK")
DEFAULT_CONTEXT = 4096  # tokens, of a server that does not say
DEFAULT_VOCABULARY = 10000  # ids that every model has


class LaunchFailed(Exception):
    """The server did not come up. The text has the end of its output."""


@dataclass(frozen=True, slots=True)
class Served:
    """Model that a server serves, and its limits."""

    model: str
    context: int  # tokens, prompt and output together
    vocab_size: int


class ServerProcess:
    """A server as a child process. Without `base_url`, the address is read from its output ("... on http://...").

    `api_key` is one of the server's keys, if it has any: without it the server would never seem to be ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        base_url: str | None = None,
        timeout: float = 300.0,
        env: dict[str, str] | None = None,
        api_key: str | None = None,
    ) -> None:
        begin = time.monotonic()
        self._log = tempfile.TemporaryFile(prefix="server-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | (env or {}),
            start_new_session=True,  # all of it can be ended together
        )
        try:
            self.base_url = self._wait_ready(base_url, api_key, begin + timeout)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - begin

    def _wait_ready(self, base_url: str | None, api_key: str | None, deadline: float) -> str:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise LaunchFailed(f"the server ended with {self.process.returncode}:\n{self.log()[-2000:]}")
            url = base_url or self._said_url()
            if url is not None and get_json(f"{url}/v1/models", api_key) is not None:
                return url
            time.sleep(0.1)
        raise LaunchFailed(f"the server was not ready in time:\n{self.log()[-2000:]}")

    def _said_url(self) -> str | None:
        found = re.search(r" on (http://\S+)", self.log())
        return found[1] if found else None

    def log(self) -> str:
        """Return the server's output so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def close(self) -> None:
        """End the server with SIGTERM, or with SIGKILL if that does not suffice."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signum)
                try:
                    self.process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    continue
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exit_on_sigterm() -> None:
    """Let SIGTERM end this program as an exception does, so that the servers it started are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def get_json(url: str, api_key: str | None = None) -> Any:
    """Return the answer to a GET, or None when there is none or it is not JSON."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=10) as answer:
            return json.load(answer)
    except (URLError, OSError, ValueError, http.client.HTTPException):
        return None


def ask_served(
    base_url: str,
    *,
    model: str | None = None,
    context: int | None = None,
    vocab_size: int | None = None,
    api_key: str | None = None,
) -> Served:
    """Return what a server serves. Arguments take precedence; what the server does not say gets a careful default."""
    models = get_json(f"{base_url}/v1/models", api_key)
    if models is None:
        raise LaunchFailed(f"no OpenAI-compatible server answers at {base_url}")
    cards = [card for card in models["data"] if model in (None, card["id"])]
    if not cards:
        raise LaunchFailed(f"{base_url} does not serve {model}")
    info = get_json(f"{base_url}/server_info", api_key) or {}
    limits = info.get("limits") or {}
    return Served(
        model=cards[0]["id"],
        context=context or cards[0].get("max_model_len") or DEFAULT_CONTEXT,
        vocab_size=vocab_size or limits.get("vocab_size") or DEFAULT_VOCABULARY,
    )


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def worker_pids(supervisor: int) -> dict[str, int]:
    """Return the process ids of a server's workers by the function that each was started with ("module:function")."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        fields = _stat(pid)
        if fields and int(fields[1]) == supervisor:
            try:
                command = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "minisgl.process.worker" in command:
                entry = command[command.index("minisgl.process.worker") + 1]
                found[entry if entry not in found else f"{entry}-{pid}"] = pid
    return found


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, also if nobody has asked for its exit code yet."""
    return _stat(pid)[:1] not in ([], ["Z"])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

"""What the supervisor calls for `--shell`: the shell as a child process that has the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import minisgl

API_KEY = "MINISGL_API_KEY"  # the environment variable of the shell's key
GRACE_SECONDS = 1.0


class ShellProcess:
    """The running shell.

    Ctrl-C reaches the whole foreground: the parent must pass over SIGINT while the shell runs, because it means to
    stop an answer. `process` ends with Ctrl-D or /exit.
    """

    def __init__(self, host: str, port: int, model: str, api_key: str | None = None) -> None:
        self._modes = _terminal_modes()
        # As for the workers: the package is found where it was found for us.
        paths = [str(Path(minisgl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        key = {} if api_key is None else {API_KEY: api_key}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minisgl.shell", "--base-url", local_url(host, port), "--model", model],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | key,
        )

    def end(self) -> int:
        """End it if it still runs, and leave the terminal as it was found; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        if self._modes is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._modes)
        return code


def local_url(host: str, port: int) -> str:
    """How a server that listens there is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _terminal_modes() -> list[Any] | None:
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):  # no terminal, or no stdin at all
        return None

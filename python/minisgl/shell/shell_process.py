"""The shell as a child process on the terminal, which the supervisor starts for `--shell`."""

from __future__ import annotations

import subprocess
import sys
import termios
from typing import Any

from minisgl.config import ConfigError
from minisgl.optional_packages import can_be_found
from minisgl.process.child import start_module

API_KEY = "MINISGL_API_KEY"  # the environment variable of the shell's key
PACKAGES = {"prompt-toolkit": "prompt_toolkit", "rich": "rich", "markdown-it-py": "markdown_it"}  # the extra `shell`


class ShellProcess:
    """The running shell.

    Ctrl-C reaches the whole foreground: the parent must pass over SIGINT while the shell runs, because it means to
    stop an answer. `process` ends with Ctrl-D or /exit.
    """

    def __init__(self, host: str, port: int, model: str, api_key: str | None = None) -> None:
        self._modes = _terminal_modes()
        key = {} if api_key is None else {API_KEY: api_key}
        self.process = start_module("minisgl.shell", "--base-url", local_url(host, port), "--model", model, env=key)

    def end(self, grace: float = 1.0) -> int:
        """End the process if it still runs, and restore the terminal's modes. A running answer gets `grace` seconds.

        Returns its exit code.
        """
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        if self._modes is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._modes)
        return code


def on_terminal() -> bool:
    """Return True if stdin and stdout are both a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def check_packages() -> None:
    """Raise ConfigError if a shell on this terminal lacks its packages; pipes need none."""
    missing = [name for name, module in PACKAGES.items() if not can_be_found(module)]
    if missing and on_terminal():
        needs = "the package" if len(missing) == 1 else "the packages"
        raise ConfigError(f"the shell needs {needs} {', '.join(missing)}: pip install 'minisgl[shell]'")


def origin(scheme: str, host: str, port: int) -> str:
    """Return `scheme://host:port`, with an IPv6 address in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def local_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a server that listens on this address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return origin("http", host, port) + "/v1"


def _terminal_modes() -> list[Any] | None:
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):  # no terminal, or no stdin
        return None

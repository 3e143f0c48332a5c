"""A person at a terminal: a pseudo-terminal with the shell as its foreground, and what has been on the screen."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

from support.server import PATIENCE, wait_until

ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])|\r")
ENTER, ALT_ENTER, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"


class Terminal:
    """Runs a command on a terminal of its own."""

    def __init__(self, *command: str, home: Path, columns: int = 100, rows: int = 30) -> None:
        self._fd, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=os.environ
            | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        )
        self._theirs = theirs
        self._bytes = b""
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                block = os.read(self._fd, 65536)
            except OSError:
                return
            if not block:
                return
            self._bytes += block

    @property
    def text(self) -> str:
        """Everything that was ever written, without the control sequences."""
        return ESCAPES.sub("", self._bytes.decode(errors="replace"))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for this after what was expected before."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            if match := re.compile(pattern, re.DOTALL).search(self.text, self._seen):
                found.append(match)
            return bool(found)

        wait_until(look, lambda: f"{pattern!r} in {self.text[self._seen :]!r}")
        self._seen = found[0].end()
        return found[0]

    def prompt(self) -> None:
        """Wait until the shell asks."""
        self.expect(r"\n>")

    def ask(self, line: str) -> None:
        self.type(line + ENTER)

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._theirs)[3] & termios.ECHO)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._theirs)
        self._reader.join(PATIENCE)
        os.close(self._fd)

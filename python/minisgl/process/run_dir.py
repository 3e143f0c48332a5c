"""The folder of a server's sockets, private to its user."""

from __future__ import annotations

import os
import tempfile

from minisgl.config import ConfigError

MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path on Linux
LONGEST_NAME = len("/tokenizer-999.ipc")  # of message.socket.Addresses


def make_run_dir() -> str:
    """A new one below TMPDIR, of mode 0700. ConfigError if no socket could be there."""
    folder = tempfile.mkdtemp(prefix="minisgl-")
    size = len(os.fsencode(folder))
    if size + LONGEST_NAME <= MAX_SOCKET_PATH and _is_text(folder):
        return folder
    os.rmdir(folder)
    raise ConfigError(
        f"TMPDIR is too long, or no UTF-8: the path {folder!r} has {size} bytes, and of a folder for sockets may have "
        f"{MAX_SOCKET_PATH - LONGEST_NAME}"
    )


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # undecodable bytes stand in it as surrogates
        return False
    return True

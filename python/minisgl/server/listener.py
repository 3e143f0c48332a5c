"""The socket on which the server listens: a TCP port, or a Unix domain socket, which is a file."""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from minisgl.config import ConfigError, HttpConfig
from minisgl.shell.shell_process import origin

BACKLOG = 2048  # connections that the kernel accepts before the server does
LOCK_TRIES = 1000  # a millisecond apart


def bind(host: str, port: int, send_timeout: float = HttpConfig().send_timeout) -> socket.socket:
    """Return a socket that listens on a TCP port. ConfigError if it cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Closes connections whose clients read nothing for this long. Accepted connections inherit it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_timeout * 1000))
        sock.bind(address)
        sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # a name of which no domain name can be made
        flag, reason = "--host", str(error)
        if isinstance(error, OSError):
            reason = error.strerror or reason
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                flag = "--port"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another {flag}") from None
    return sock


def bind_unix(path: str) -> socket.socket:
    """Return a socket that listens at a path, whose file is removed when this process ends.

    A file that a killed server has left there is replaced. ConfigError if another server listens there, or if the path
    cannot be bound. Who may connect follows from the umask: with 022 only the user of the server.
    """
    path = os.path.abspath(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _one_at_a_time(os.path.dirname(path)):
            if _is_left_behind(path):
                os.unlink(path)
            sock.bind(path)
            atexit.register(_remove, path, _identity(path))
            sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; choose another --uds") from None
    return sock


@contextmanager
def _one_at_a_time(folder: str) -> Iterator[None]:
    """Keep out other servers that bind in this folder: one would take a file whose server will listen for left behind.

    Whoever else holds the folder's lock is waited for, but not for long.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it cannot be listed, or there is none, which `bind` will say
        yield
        return
    try:
        with suppress(OSError):  # the file system has no locks
            _lock(descriptor)
        yield
    finally:
        os.close(descriptor)  # and frees the lock


def _lock(descriptor: int) -> None:
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.001)


def _is_left_behind(path: str) -> bool:
    """Return True if the path is a Unix domain socket on which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a listener whose backlog is full would let it wait
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:  # there is no file, its listener is busy, or it is not ours
        return False
    return False


def _identity(path: str) -> tuple[int, int, int]:
    """Return what tells a file from a later one at the same path, which may have its inode number."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _remove(path: str, identity: tuple[int, int, int]) -> None:
    """Remove the file, unless another server has put its own in its place."""
    with suppress(OSError):
        if _identity(path) == identity:
            os.unlink(path)


def url_of(sock: socket.socket, scheme: str) -> str:
    """Return the URL of a listening socket, for a log line."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return origin(scheme, host, port)

"""The folder of a server's sockets.

Its process removes it at the end, or a worker does when that process has been killed. If all processes are killed at
once it stays, until the next server of the user starts. The folder is locked as long as its process lives, so that a
living server's is never taken for one that is left behind: numbers of processes are used again, and mean nothing in
another container that shares the disk. Machines that share it may not see each other's locks (NFS with local_lock,
Lustre with localflock), so the folder has a file with the id of its machine's boot, too.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from minisgl.config import ConfigError

MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path on Linux
LONGEST_NAME = len("/tokenizer-999.ipc")  # longest name in message.socket.Addresses
PREFIX = "minisgl-run-"
REMOVED = "-removed"  # added to the name by a worker that removes the folder
BOOT_ID = "boot_id"  # name of a file in the folder
_BOOT_ID_OF_MACHINE = Path("/proc/sys/kernel/random/boot_id")  # equal in all containers
_UNLOCKED = "minisgl-new-"  # not locked yet, or on a file system without locks; as long as the prefix
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}({REMOVED})?")  # `tempfile` adds eight characters


class RunDir:
    """Folder in TMPDIR with mode 0700.

    ConfigError if it cannot be created, for instance on a read-only disk, or if its path is too long for a socket.
    """

    def __init__(self) -> None:
        folder = _make()
        self._lock = _lock(folder)
        self.path = folder
        if self._lock is not None and _write_boot_id(folder):
            parent, name = os.path.split(folder)
            self.path = os.path.join(parent, PREFIX + name.removeprefix(_UNLOCKED))
            os.rename(folder, self.path)

    def remove(self) -> None:
        """Remove the folder. May be called repeatedly."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make() -> str:
    try:
        parent = tempfile.gettempdir()
        _remove_left_behind(parent)
        folder = tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent)
    except OSError as error:
        reason = error.strerror if error.filename is None else error
        raise ConfigError(
            f"there is no folder for the server's sockets: {reason}; set TMPDIR to one that can be written"
        ) from None
    size = len(os.fsencode(folder))
    if size + LONGEST_NAME <= MAX_SOCKET_PATH and _is_text(folder):
        return folder
    os.rmdir(folder)
    raise ConfigError(
        f"TMPDIR is too long, or not UTF-8: the path {folder!r} has {size} bytes, and a folder for sockets may have "
        f"{MAX_SOCKET_PATH - LONGEST_NAME}"
    )


def _remove_left_behind(parent: str) -> None:
    """Remove the user's folders whose processes of this machine are dead, as far as possible."""
    names: list[str] = []
    with suppress(OSError):  # some may create files in TMPDIR and not list it
        names = os.listdir(parent)
    for name in filter(_NAME.fullmatch, names):
        folder = os.path.join(parent, name)
        lock = _lock(folder)
        if lock is not None:
            if _is_ours(os.fstat(lock)) and _is_of_this_boot(folder):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: str) -> int | None:
    """Lock a folder until the returned descriptor is closed. None if it is locked, or cannot be."""
    descriptor = None
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    if descriptor is not None:
        os.close(descriptor)
    return None


def _is_ours(folder: os.stat_result) -> bool:
    return folder.st_uid == os.geteuid() and stat.S_IMODE(folder.st_mode) == stat.S_IRWXU


def _write_boot_id(folder: str) -> bool:
    """Return True unless the machine has no such id, or no room on the disk."""
    with suppress(OSError):
        Path(folder, BOOT_ID).write_bytes(_BOOT_ID_OF_MACHINE.read_bytes())
        return True
    return False


def _is_of_this_boot(folder: str) -> bool:
    with suppress(OSError):
        return Path(folder, BOOT_ID).read_bytes() == _BOOT_ID_OF_MACHINE.read_bytes()
    return False


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # Python represents undecodable bytes as surrogates
        return False
    return True

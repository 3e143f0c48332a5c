"""Places of a server's sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from minisgl.config import ConfigError
from minisgl.message.socket import Addresses
from minisgl.process.run_dir import BOOT_ID, LONGEST_NAME, MAX_SOCKET_PATH, PREFIX, REMOVED, RunDir


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Give an empty folder. The path of pytest's `tmp_path` leaves too little room for a socket's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_the_folder_is_the_users_alone(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    run_dir = RunDir()
    folder = Path(run_dir.path)
    assert folder.parent == short_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    addresses = Addresses("")
    names = (addresses.api, addresses.scheduler, addresses.detokenizer, addresses.rank(63), addresses.tokenizer(999))
    assert max(len(name.removeprefix("ipc://")) for name in names) < LONGEST_NAME
    run_dir.remove()
    run_dir.remove()
    assert not list(short_path.iterdir())
    open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [path for path in open_files if path.startswith(run_dir.path)], "the lock is given back"


MAKE = "from minisgl.process.run_dir import RunDir; folder = RunDir(); print(folder.path, flush=True)"


def test_folders_of_killed_processes_are_removed_at_the_next_start(short_path: Path) -> None:
    def make(then: str) -> subprocess.Popen[str]:
        environment = os.environ | {"TMPDIR": str(short_path)}
        command = [sys.executable, "-c", f"{MAKE}; import os, sys; {then}"]
        return subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True)

    def path_of(process: subprocess.Popen[str]) -> Path:
        assert process.stdout is not None
        return Path(process.stdout.readline().strip())

    forking, living, killed = make("os.fork() or sys.stdin.read()"), make("sys.stdin.read()"), make("sys.stdin.read()")
    folders = [path_of(process) for process in (forking, living, killed)]
    forking.wait()  # its child still holds the lock, and may use the folder
    (folders[2] / "api.ipc").touch()
    half_removed = short_path / f"{PREFIX}12345678{REMOVED}"
    half_removed.mkdir(mode=0o700)
    shutil.copy(folders[0] / BOOT_ID, half_removed)
    others = [short_path / name for name in ("minisgl-run-mine", "minisgl-12345678", f"x{PREFIX}12345678")]
    for folder in others:
        folder.mkdir(mode=0o700)
    of_others = [
        short_path / f"{PREFIX}{name}" for name in ("machine_", "no_file_")
    ]  # whose locks may not be seen here
    for folder in of_others:
        folder.mkdir(mode=0o700)
    (of_others[0] / BOOT_ID).write_text("3f6f7ed8-0000-4000-8000-000000000000\n")
    if os.geteuid() == 0:  # who alone may give and open it
        of_others.append(short_path / f"{PREFIX}one_user")
        of_others[-1].mkdir(mode=0o700)
        shutil.copy(folders[0] / BOOT_ID, of_others[-1])
        os.chown(of_others[-1], os.geteuid() + 1, -1)
    link = short_path / f"{PREFIX}abcdefgh"
    link.symlink_to(others[0])
    shared = short_path / f"{PREFIX}shared_1"
    shared.mkdir(mode=0o755)
    shutil.copy(folders[0] / BOOT_ID, shared)
    killed.kill()
    killed.wait()

    last = path_of(make("pass"))
    assert {*short_path.iterdir()} == {*folders[:2], *others, *of_others, link, shared, last}
    for process in (forking, living):
        assert process.stdin is not None
        process.stdin.close()
    living.wait()


def test_a_folder_that_cannot_be_locked_is_never_taken_for_a_dead_one(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EBADF, "as NFS says")

    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    with monkeypatch.context() as without_locks:
        without_locks.setattr(fcntl, "flock", refuse)
        folder = RunDir()
    RunDir().remove()
    assert [str(path) for path in short_path.iterdir()] == [folder.path]


def test_a_path_that_no_socket_may_have_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("x" * MAX_SOCKET_PATH, "\udcff"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(ConfigError, match="TMPDIR is too long, or not UTF-8"):
            RunDir()
        assert not list(folder.iterdir())


def test_the_longest_path_has_room_for_every_socket(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    room = MAX_SOCKET_PATH - LONGEST_NAME - len(f"{short_path}//{PREFIX}12345678")
    longest, too_long = short_path / ("x" * room), short_path / ("x" * (room + 1))
    longest.mkdir()
    too_long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    run_dir = RunDir()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(Addresses(run_dir.path).tokenizer(999).removeprefix("ipc://"))
    run_dir.remove()
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    with pytest.raises(ConfigError, match="TMPDIR is too long"):
        RunDir()


def test_the_server_says_so_in_a_line(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * MAX_SOCKET_PATH)
    folder.mkdir()
    command = [sys.executable, "-m", "minisgl", "--port", "0"]
    done = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(folder)}, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("minisgl: error: TMPDIR")
    assert "Traceback" not in done.stderr


def test_without_a_folder_that_can_be_written_the_server_says_so_in_a_line() -> None:
    """A container with a read-only disk has no such folder. Here a limit lets no process write to a file."""
    command = f"ulimit -f 0 && exec {sys.executable} -m minisgl --port 0"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("minisgl: error: there is no folder for the server's sockets: No usable temporary directory")
    assert line.endswith("set TMPDIR to one that can be written")

"""Places of a server's sockets."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.message.socket import Addresses
from minisgl.process.machine import LONGEST_NAME, MAX_SOCKET_PATH, make_run_dir


def test_the_folder_is_the_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(make_run_dir())
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    addresses = Addresses("")
    names = (addresses.api, addresses.scheduler, addresses.detokenizer, addresses.rank(63), addresses.tokenizer(999))
    assert max(len(name.removeprefix("ipc://")) for name in names) < LONGEST_NAME


def test_a_path_that_no_socket_may_have_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("x" * MAX_SOCKET_PATH, "\udcff"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(ConfigError, match="TMPDIR is too long, or not UTF-8"):
            make_run_dir()
        assert not list(folder.iterdir())


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

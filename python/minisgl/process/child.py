"""Starts child processes that run a module of this package, and workers, which have a control pipe."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minisgl
from minisgl.message.control import ControlPipe, Start, ToSupervisor


def start_module(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments`; `env` is added to the environment, `options` are those of Popen.

    The child imports the same installation of the package, and files in the current folder cannot shadow modules.
    """
    paths = [str(Path(minisgl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, env=os.environ | found | dict(env or {}), **options)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP, because the parent gets them too and ends its children in order."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@dataclass(slots=True, eq=False)
class Child:
    """A running worker, and our end of its control pipe; the worker ends when that is closed."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: ControlPipe[ToSupervisor]
    ready: bool = False


def start_worker(name: str, entry: str, start: Start, env: Mapping[str, str] | None = None) -> Child:
    """Start a worker whose entry is "package.module:function"; `env` is added to the environment."""
    ours, theirs = socket.socketpair()
    fds = [theirs.fileno()] if start.listen_fd is None else [theirs.fileno(), start.listen_fd]
    process = start_module(
        "minisgl.process.worker",
        entry,
        str(theirs.fileno()),
        env=env,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only the parent, which ends the workers in order
    )
    theirs.close()
    pipe: ControlPipe[ToSupervisor] = ControlPipe(ours, ToSupervisor)  # type: ignore[arg-type]
    pipe.send(start)
    return Child(name, process, pipe)

"""Starting one worker process with a control pipe."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from minisgl.message.control import ControlPipe, Start, ToSupervisor
from minisgl.process.child import start_module


@dataclass(slots=True, eq=False)
class Child:
    """A running worker, and our end of its control pipe: it ends when that closes."""

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
        start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the others in order
    )
    theirs.close()
    pipe: ControlPipe[ToSupervisor] = ControlPipe(ours, ToSupervisor)  # type: ignore[arg-type]
    pipe.send(start)
    return Child(name, process, pipe)

"""Child processes that run a module of this package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import minisgl


def start_module(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments`; `env` is added to the environment, `options` are those of Popen.

    The package is found where it was found for us, and nothing in the current folder shadows a module.
    """
    paths = [str(Path(minisgl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, env=os.environ | found | dict(env or {}), **options)


def leave_signals_to_parent() -> None:
    """Of a process that ends with its parent: Ctrl-C, a closed terminal, and whoever ends a service, signal both."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

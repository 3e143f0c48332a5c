"""CPU time of processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def worker_pids(supervisor: int) -> dict[str, int]:
    """The server's worker processes, by the function that each was started with ("module:function")."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        fields = _stat(pid)
        if fields and int(fields[1]) == supervisor:
            try:
                command = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "minisgl.process.worker" in command:
                entry = command[command.index("minisgl.process.worker") + 1]
                found[entry if entry not in found else f"{entry}-{pid}"] = pid
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat that follow the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

"""Results as a table on stdout and as JSON, with the machine they come from."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minisgl import __version__, tables

Cell = str | int | float | None


def table(header: Sequence[str], rows: Iterable[Iterable[Cell]]) -> str:
    """Return aligned columns: the first to the left, the others to the right."""
    return "\n".join(tables.table(header, ([cell_text(cell) for cell in row] for row in rows)))


def cell_text(cell: Cell) -> str:
    """Return a cell's text; numbers have the digits that matter."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    if abs(cell) >= 1000:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.2f}" if abs(cell) >= 1 else f"{cell:.3f}"


def environment() -> dict[str, Any]:
    """Return what a figure depends on besides the program: the machine, its load, versions of what is loaded."""
    found: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "minisgl": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }
    for package in ("torch", "transformers", "vllm", "sglang"):
        if package in sys.modules:
            found[package] = getattr(sys.modules[package], "__version__", "unknown")
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write_json(path: Path, tool: str, arguments: dict[str, Any], results: Any) -> None:
    """Write one file for a run: what was asked, where it ran, what came out."""
    document = {"tool": tool, "arguments": arguments, "environment": environment(), "results": results}
    path.write_text(json.dumps(document, indent=2, default=_plain) + "\n")


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return value.name
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

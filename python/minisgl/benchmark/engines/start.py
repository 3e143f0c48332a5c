"""The start of an engine, timed, and what every measurement says of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl.benchmark.engines.base import EngineOptions, OfflineEngine, make_engine
from minisgl.benchmark.report import environment
from minisgl.benchmark.shapes import read_vocab_size


@contextmanager
def started(name: str, options: EngineOptions) -> Iterator[tuple[OfflineEngine, int, dict[str, Any]]]:
    """The engine, its vocabulary's size, and the beginning of its results."""
    begin = time.perf_counter()
    engine = make_engine(name, options)
    result: dict[str, Any] = {
        "start_seconds": time.perf_counter() - begin,
        "phases": engine.phases,
        "environment": environment(),
    }
    try:
        yield engine, read_vocab_size(Path(options.model)), result
    finally:
        engine.close()

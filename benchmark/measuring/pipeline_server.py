"""The real server with the instant engine: `python -m measuring.pipeline_server FLAGS`.

The folder above this one must be in PYTHONPATH, where the workers look, too; FLAGS are those of minisgl.
MINISGL_STEP_MS is the time of an engine's step in milliseconds. With MINISGL_PROFILE_DIR in the environment every
worker has a profiler (`measuring.profiler`) that SIGUSR1 starts and ends; its result is PROCESS.json there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from measuring.profiler import Profiler
from minisgl.cli import parse_args
from minisgl.process.machine import raise_open_files
from minisgl.process.worker import Worker
from minisgl.server.listener import bind
from minisgl.server.supervisor import Supervisor

STEP_MS = "MINISGL_STEP_MS"
PROFILE_DIR = "MINISGL_PROFILE_DIR"
ENTRIES = {  # entry point by kind of worker
    "scheduler": "measuring.instant_engine",
    "tokenizer": "minisgl.tokenizer.tokenizer_worker",
    "detokenizer": "minisgl.tokenizer.detokenizer_worker",
    "api": "minisgl.server.api.api_process",
}


def _run(kind: str, worker: Worker) -> None:
    if folder := os.environ.get(PROFILE_DIR):
        Profiler(Path(folder) / f"{kind}.json")
    run: Callable[[Worker], None] = import_module(ENTRIES[kind]).run
    run(worker)


# The workers' entry points: their names are what tells the processes apart.
def scheduler(worker: Worker) -> None:
    _run("scheduler", worker)


def tokenizer(worker: Worker) -> None:
    _run("tokenizer", worker)


def detokenizer(worker: Worker) -> None:
    _run("detokenizer", worker)


def api(worker: Worker) -> None:
    _run("api", worker)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config, find = parse_args(sys.argv[1:])
    raise_open_files(config.http.max_queued_requests)
    listener = bind(config.host, config.port)
    folders = find()
    entries = {kind: f"measuring.pipeline_server:{kind}" for kind in ENTRIES}
    return Supervisor(config.located(folders.model, folders.tokenizer), listener, entries).run()


if __name__ == "__main__":
    sys.exit(main())

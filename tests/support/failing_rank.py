"""Entry of a worker that says why it failed, and takes its time to end."""

from __future__ import annotations

import threading

from minisgl.process.worker import Worker


def run(worker: Worker) -> None:
    worker.failed("the scales are no numbers")
    threading.Event().wait()

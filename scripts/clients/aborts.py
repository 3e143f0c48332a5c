"""Requests that a client left in the middle: the server aborts them."""

from __future__ import annotations

import os
import re
import time
import urllib.request

ABORTED = re.compile(r'^minisgl:request_success_total\{finished_reason="abort".*\} (\S+)$', re.MULTILINE)


def wait_for_aborts(count: int) -> None:
    """Wait until the server has aborted so many requests."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    metrics = urllib.request.Request(os.environ["MINISGL_URL"] + "/metrics", headers=headers)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with urllib.request.urlopen(metrics) as answer:
            found = ABORTED.search(answer.read().decode())
        if found is not None and float(found[1]) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"the server did not abort {count} requests")

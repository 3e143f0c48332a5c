"""Bounds of torch's CPU libraries in a process that has imported torch before it makes an engine.

Worker processes get theirs in the environment (`process.cpu_environment`). oneDNN reads its own at its first use, so
they can still be set here. libgomp has read GOMP_SPINCOUNT already: its threads spin as the user's environment says.
"""

from __future__ import annotations

import os

from minisgl.process.cpu_environment import PRIMITIVE_CACHES


def bound_primitive_caches() -> None:
    """Set the environment variables of oneDNN's caches that the user has not set."""
    for name, value in PRIMITIVE_CACHES.items():
        os.environ.setdefault(name, value)

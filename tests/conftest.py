"""Options, environment and order of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--demo-cases", type=int, default=2, help="unseen cases of each skill that tests/e2e asks each server"
    )
    parser.addoption(
        "--grammar-draws",
        type=int,
        default=4,
        help="texts drawn from each schema in tests/structured_output",
    )
    parser.addoption(
        "--simulated-requests", type=int, default=400, help="arrivals in each world of tests/scheduler's simulation"
    )


def pytest_configure() -> None:
    """Trust no certificates: each HTTP client would load the system's for 30 ms, and tests use only local servers."""
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)


LONG = ("exact", "e2e", "server", "pooling", "llm", "models")  # folders whose files take longest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders of long files: at the end short ones fill whichever process is free."""
    items.sort(key=lambda item: LONG.index(item.path.parent.name) if item.path.parent.name in LONG else len(LONG))

"""Snapshots of a hybrid's states on a GPU: tiny models in float32, token for token as transformers has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from exact.conversations import converse
from exact.oracle import Oracle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-next"])
def test_conversations_go_on_from_snapshots(kind: str, tmp_path: Path) -> None:
    found = converse(Oracle(kind, tmp_path), device="cuda")
    assert found.counts["snapshots_evicted"] >= 4
    assert found.retractions >= 1

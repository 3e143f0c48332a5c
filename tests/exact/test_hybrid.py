"""A hybrid's states survive chunks, mixed batches, retraction, slots that change hands, snapshots, and two ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from exact.conversations import converse
from exact.oracle import Oracle


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the other ranks
    found = converse(Oracle("qwen3.5", tmp_path), device="cpu", tp_size=2)
    assert found.counts["snapshot_hits"] >= 5
    assert found.counts["snapshots_evicted"] >= 4
    assert found.retractions >= 1

"""Tests that need several GPUs."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip a test where fewer than `count` GPUs are present; the reason names both numbers."""
    present = torch.cuda.device_count()
    return pytest.mark.skipif(present < count, reason=f"needs {count} GPUs, and {present} are present")


def over_gpus(*counts: int) -> pytest.MarkDecorator:
    """Run a test with `tp_size` of each of the counts for which there are GPUs."""
    return pytest.mark.parametrize("tp_size", [pytest.param(count, marks=needs_gpus(count)) for count in counts])

"""Tests that need several GPUs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

import pytest
import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip a test where fewer than `count` GPUs are present; the reason names both numbers."""
    present = torch.cuda.device_count()
    return pytest.mark.skipif(present < count, reason=f"needs {count} GPUs, and {present} are present")


def over_gpus(*counts: int) -> pytest.MarkDecorator:
    """Run a test with `tp_size` of each of the counts for which there are GPUs."""
    return pytest.mark.parametrize("tp_size", [pytest.param(count, marks=needs_gpus(count)) for count in counts])


def in_new_process(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a process of its own, where a rank that was killed leaves nothing to later tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()


def sum_over_ranks(values: Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
    """Add in float32 and in the order of the ranks, round, add the residual, round again."""
    total = torch.zeros_like(values[0], dtype=torch.float32)
    for value in values:
        total += value.float()
    rounded = total.to(values[0].dtype)
    return rounded if residual is None else rounded + residual

"""Modules whose forward calls another rotation in place of that of their file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minisgl.models.generic.rotation import RotationProbe, leave_unrotated


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]

    return turned(q), turned(k)


def renamed(old: str, new: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like that of transformers for arguments with a new name."""

    def decorator(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return forward(*args, **kwargs)

        return wrapper

    return decorator


class Rotating(nn.Module):
    def forward(self, q: Tensor, *, angles: tuple[Tensor, Tensor]) -> Tensor:
        return apply_rotary_pos_emb(q, q, *angles)[0]


class Decorated(nn.Module):
    @renamed("turns", "angles")
    @renamed("angle", "angles")
    def forward(self, q: Tensor, *, angles: tuple[Tensor, Tensor]) -> Tensor:
        return apply_rotary_pos_emb(q, q, *angles)[0]


class Partial:
    """Decorator that is no function, of which no copy is made."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


class Foreign(nn.Module):
    @renamed("turns", "angles")
    @Partial
    def forward(self, q: Tensor, *, angles: tuple[Tensor, Tensor]) -> Tensor:
        return apply_rotary_pos_emb(q, q, *angles)[0]


Q, ANGLES = torch.randn(1, 2, 3, 8), (torch.randn(1, 3, 8), torch.randn(1, 3, 8))


@pytest.mark.parametrize(("kind", "name"), [(Rotating, "angles"), (Decorated, "angles"), (Decorated, "turns")])
def test_a_forward_is_left_unrotated_and_keeps_its_decorators(kind: type[nn.Module], name: str) -> None:
    module, other = kind(), kind()
    before = module(Q, **{name: ANGLES})
    assert not torch.equal(before, Q)
    leave_unrotated(module)
    assert torch.equal(module(Q, **{name: ANGLES}), Q)
    assert torch.equal(other(Q, **{name: ANGLES}), before)


@pytest.mark.parametrize(("kind", "is_replaced"), [(Rotating, True), (Decorated, True), (Foreign, False)])
def test_only_forwards_that_can_be_copied_are_watched(kind: type[nn.Module], is_replaced: bool) -> None:
    module = kind()
    before = module(Q, angles=ANGLES)
    RotationProbe({module: "attention"}).watch(module)
    assert ("forward" in vars(module)) == is_replaced
    assert torch.equal(module(Q, angles=ANGLES), before)

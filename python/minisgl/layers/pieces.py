"""How a layer says what it takes from a checkpoint, so that loading knows nothing of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one checkpoint tensor and the part of a parameter that it fills.

    A `tied` piece is filled under another name: the checkpoint may lack it, and must repeat the values if not.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    source: tuple[slice, ...]  # what this rank keeps of it
    target: Tensor  # a view of the parameter, as large as the source
    tied: bool = False


@runtime_checkable
class Loadable(Protocol):
    def pieces(self, name: str) -> Iterator[Piece]:
        """Everything this layer keeps; `name` is its path in the model, which is also its checkpoint name."""
        ...


@runtime_checkable
class Stackable(Protocol):
    """A loadable whose tensors some checkpoints hold stacked into one."""

    def stacked_pieces(self, name: str) -> Iterator[Piece]:
        """What it keeps of such a checkpoint; stands for `pieces` where the first of these is in the file."""
        ...


def whole(name: str, target: Tensor) -> Piece:
    """A tensor that every rank keeps as it is."""
    return Piece(name, tuple(target.shape), (slice(None),) * target.ndim, target)

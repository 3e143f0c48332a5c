"""Slices of a checkpoint by which a layer says what it takes, so that loading knows nothing of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A part of one checkpoint tensor and the part of a parameter that it fills.

    A `tied` slice is filled under another name: the checkpoint may lack it, and must repeat the values if not.
    """

    name: str
    shape: tuple[int, ...]  # shape of the whole tensor in the checkpoint
    source: tuple[slice, ...]  # part that this rank keeps
    target: Tensor  # a view of the parameter, as large as the source
    tied: bool = False
    offset: float = 0.0  # added to what the checkpoint holds
    factor: float = 1.0  # factor of its values

    @property
    def is_read(self) -> bool:
        """False if another slice fills the target, or this rank keeps nothing of the tensor."""
        return not self.tied and self.target.numel() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlice(WeightSlice):
    """A part of a mixture's matrices, which may stay quantized: some `rows` of experts from the `first` on."""

    gated: bool  # True for the first product, whose matrix holds gates and ups
    first: int
    rows: slice


@runtime_checkable
class Loadable(Protocol):
    """A layer with weights of a checkpoint."""

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Everything this layer keeps; `name` is its path in the model, which is also its checkpoint name."""


@runtime_checkable
class Stackable(Protocol):
    """A loadable whose tensors some checkpoints hold stacked into one."""

    def stacked_slices(self, name: str) -> Iterator[WeightSlice]:
        """Everything this layer keeps of such a checkpoint, in place of `weight_slices` if a file has the first one."""


def row_slices(
    name: str, rows: int, kept: Sequence[range], target: Tensor, *, offset: float = 0.0
) -> Iterator[WeightSlice]:
    """Ranges of a tensor's `rows` rows, one after another in the target."""
    at = 0
    for part in kept:
        source = (slice(part.start, part.stop, part.step), *[slice(None)] * (target.ndim - 1))
        yield WeightSlice(name, (rows, *target.shape[1:]), source, target[at : at + len(part)], offset=offset)
        at += len(part)


def elsewhere(name: str, shape: tuple[int, ...], like: Tensor) -> WeightSlice:
    """A tensor that other ranks keep; `like`: any parameter of this one."""
    return WeightSlice(name, shape, (slice(0, 0),) * len(shape), like[:0])


def whole(name: str, target: Tensor, *, factor: float = 1.0) -> WeightSlice:
    """A tensor that every rank keeps as it is, or times the factor."""
    return WeightSlice(name, tuple(target.shape), (slice(None),) * target.ndim, target, factor=factor)

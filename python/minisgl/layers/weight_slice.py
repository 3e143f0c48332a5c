"""Slices of a checkpoint, by which a layer names its weights, so that loading needs no knowledge of layers."""

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
    factor: float = 1.0  # multiplies what the checkpoint holds

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
        """Return all slices that this layer keeps; `name` is its path in the model and in the checkpoint."""


@runtime_checkable
class Stackable(Protocol):
    """A loadable whose tensors some checkpoints hold stacked into one."""

    def stacked_slices(self, name: str) -> Iterator[WeightSlice]:
        """Return the slices of a stacked checkpoint; they replace `weight_slices` if a file has the first of them."""


def beside(name: str, other: str) -> str:
    """Return the name in the checkpoint of what stands beside a module of this name."""
    return f"{name.rpartition('.')[0]}.{other}"


def row_slices(
    name: str, rows: int, kept: Sequence[range], target: Tensor, *, offset: float = 0.0
) -> Iterator[WeightSlice]:
    """Return ranges of a tensor's `rows` rows, one after another in the target."""
    at = 0
    for part in kept:
        source = (slice(part.start, part.stop, part.step), *[slice(None)] * (target.ndim - 1))
        yield WeightSlice(name, (rows, *target.shape[1:]), source, target[at : at + len(part)], offset=offset)
        at += len(part)


def elsewhere(name: str, shape: tuple[int, ...], like: Tensor) -> WeightSlice:
    """Return the slice of a tensor that only other ranks keep; `like` is any parameter of this rank."""
    return WeightSlice(name, shape, (slice(0, 0),) * len(shape), like[:0])


def whole(name: str, target: Tensor, *, factor: float = 1.0) -> WeightSlice:
    """Return the slice of a tensor that every rank keeps, multiplied by the factor."""
    return WeightSlice(name, tuple(target.shape), (slice(None),) * target.ndim, target, factor=factor)

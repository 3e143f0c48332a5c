"""Rules for the form of a weight when it is loaded: dense, or quantized as its products read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.distributed import TPGroup
from minisgl.layers.linear import Linear
from minisgl.layers.mlp import Experts
from minisgl.quantization.levels import LevelFormat
from minisgl.quantization.rounding import INT4_FORMAT, Method, largest_of_rows

Keeps = Callable[[LevelFormat, int, int, torch.dtype], bool]
"""Ops.keeps or Ops.keeps_experts."""


@dataclass(frozen=True, slots=True)
class WeightForms:
    """Rules for the forms of a model's weights."""

    device: torch.device
    tp: TPGroup
    keeps: Keeps | None  # None: every weight is dense
    keeps_experts: Keeps | None = None
    method: Method | None = None  # method by which weights are rounded
    fp8_activations: bool = False  # products may round x to FP8 where the format does; that of `method` fp8 does

    def rounded(self, module: Linear) -> LevelFormat | None:
        """Return the format that a dense weight is rounded to when it is loaded, if products read that format."""
        rounds_x = self.fp8_activations and self.method == "fp8"
        form = INT4_FORMAT if self.method == "int4" else self._rounding(rounds_x=rounds_x)
        return _kept(form, self.keeps, module.weight)

    def stored(self, module: Linear, formats: set[LevelFormat | None]) -> LevelFormat | None:
        """Return the common format of all parts of a weight, if products read that format."""
        formats = _by_one_scale(formats) if self.fp8_activations else _in_16_bits(formats)
        return _kept(_only(formats), self.keeps, module.weight)

    def rounded_experts(self, experts: Experts) -> LevelFormat | None:
        """Return the format that dense experts are rounded to, if products read that format."""
        return _kept(self._rounding(), self.keeps_experts, experts.w13, experts.w2)

    def stored_experts(self, experts: Experts, formats: set[LevelFormat | None]) -> LevelFormat | None:
        """Return the common format of all parts of experts, if products read it; these products never round x."""
        return _kept(_only(_in_16_bits(formats)), self.keeps_experts, experts.w13, experts.w2)

    def largest_of_rows(self, weight: Tensor, *, divided: bool) -> Tensor:
        """Return each row's largest magnitude, float32 [out, 1], over all ranks' columns if they are `divided`."""
        largest = largest_of_rows(weight)
        return self.tp.all_gather(largest).amax(1, keepdim=True) if divided and self.tp.size > 1 else largest

    def _rounding(self, *, rounds_x: bool = False) -> LevelFormat | None:
        """Return the 8-bit format of `method`, for weights and experts."""
        if self.method is None or self.method == "int4":
            return None
        return LevelFormat(self.method, rounds_x=rounds_x)


def _in_16_bits(formats: set[LevelFormat | None]) -> set[LevelFormat | None]:
    return {form and replace(form, rounds_x=False, x_scale=0.0) for form in formats}


def _by_one_scale(formats: set[LevelFormat | None]) -> set[LevelFormat | None]:
    """Return the formats with the largest scale of x in each, because x is rounded once for all parts of a weight."""
    largest = max((form.x_scale for form in formats if form is not None), default=0.0)
    return {form and replace(form, x_scale=largest if form.x_scale else 0.0) for form in formats}


def _only(formats: set[LevelFormat | None]) -> LevelFormat | None:
    """Return the format if all parts have the same one."""
    return next(iter(formats)) if len(formats) == 1 else None


def _kept(form: LevelFormat | None, keeps: Keeps | None, *matrices: Tensor) -> LevelFormat | None:
    """Return the format if products read matrices [.., out, in] in it."""
    if keeps is None or form is None:
        return None
    for matrix in matrices:
        width, size = matrix.shape[-2:]
        if not keeps(form, width, size, matrix.dtype):
            return None
    return form

"""Loads the weights of linear layers in the form that their products read: dense, or quantized.

A weight gets its memory when its first part is read, and is rounded (`--quantization`) when its last one is. So memory
holds no more unrounded weights than those of the layers under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.layers.linear import Linear, RowParallelLinear, allocate, unallocated
from minisgl.layers.weight_slice import WeightSlice
from minisgl.models.weights.checkpoint import Checkpoint
from minisgl.models.weights.forms import WeightForms
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.random_levels import random_levels
from minisgl.quantization.rounding import levels_of_8_bits, levels_of_int4


class LinearLoader:
    """Weight of one layer while its parts are read."""

    def __init__(self, module: Linear, forms: WeightForms, parts: Iterable[WeightSlice]) -> None:
        self._module, self._forms = module, forms
        self._parts = [part for part in parts if part.target.is_meta]
        self._left = len(self._parts)
        self._levels: Levels | None = None

    def read(self, checkpoint: Checkpoint, part: WeightSlice) -> None:
        """Read one of the parts."""
        module = self._module
        if self._left == len(self._parts):
            self._choose({checkpoint.level_format(each.name, each.source) for each in self._parts})
        rows = _rows(part.target)
        if self._levels is None:
            checkpoint.read_into(module.weight[rows], part.name, part.source)
        else:
            checkpoint.read_levels_into(self._levels[rows], part.name, part.source)
        self._part_loaded()

    def draw(self, part: WeightSlice, stored: LevelFormat | None, std: float, generator: torch.Generator) -> None:
        """Fill one of the parts with random values, in the checkpoint's format."""
        if self._left == len(self._parts):
            self._choose({stored})
        rows = _rows(part.target)
        if self._levels is None:
            self._module.weight[rows].normal_(std=std, generator=generator)
        else:
            self._levels[rows].copy_(random_levels(self._levels.format, part.target.shape, std, generator))
        self._part_loaded()

    def _choose(self, formats: set[LevelFormat | None]) -> None:
        """Give a weight its memory, in the format that all of its parts have if it is kept."""
        form = self._forms.stored(self._module, formats)
        if form is None:
            allocate(self._module, self._forms.device)
        else:
            self._levels = Levels.empty(form, self._module.weight.shape, self._forms.device)

    def _part_loaded(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._module.levels = self._levels or self._round()

    def _round(self) -> Levels | None:
        module = self._module
        form = self._forms.rounded(module)
        if form is None or form.kind == "mxfp4":
            return None
        if form.kind == "int4":
            levels = levels_of_int4(module.weight)
        else:
            largest = self._forms.largest_of_rows(module.weight, divided=isinstance(module, RowParallelLinear))
            levels = replace(levels_of_8_bits(module.weight, form.kind, largest), format=form)
        module.weight = unallocated(*module.weight.shape, dtype=module.weight.dtype)
        return levels


def _rows(part: Tensor) -> slice:
    """Return the rows of a merged matrix that this part fills."""
    start = part.storage_offset() // part.stride(0)
    return slice(start, start + len(part))

"""Fills the weights of linear layers in the form that their products will read: quantized ones stay so where they can.

A weight gets its memory when its first part is read, and is rounded (`--quantization`) when its last one is: beside the
model there are never more than the layers under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.distributed import TPGroup
from minisgl.layers.linear import Linear, RowParallelLinear, allocate, unallocated
from minisgl.layers.weight_slice import WeightSlice
from minisgl.models.checkpoint import Checkpoint
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.rounding import Method, largest_of_rows, levels_of_8_bits

Keeps = Callable[[LevelFormat, int, int, torch.dtype], bool]
"""Ops.keeps."""


@dataclass(frozen=True, slots=True)
class WeightForms:
    """Rules by which a weight's form is chosen."""

    device: torch.device
    tp: TPGroup
    keeps: Keeps | None  # None: every weight is dense
    method: Method | None = None  # that weights are rounded by
    fp8_activations: bool = False  # products may round x to FP8 where the checkpoint's format does

    def rounded(self, module: Linear) -> LevelFormat | None:
        """Return the format that a dense weight is rounded to when it is filled, if it is kept in it."""
        if self.method is None or self.method == "int4":
            return None
        return self._kept({LevelFormat(self.method)}, module)

    def stored(self, module: Linear, formats: set[LevelFormat | None]) -> LevelFormat | None:
        """Return the format of all parts of a weight, if it is kept in it."""
        if not self.fp8_activations:
            formats = {form and replace(form, rounds_x=False) for form in formats}
        return self._kept(formats, module)

    def _kept(self, formats: set[LevelFormat | None], module: Linear) -> LevelFormat | None:
        """Return the only format of these, if it is kept."""
        width, size = module.weight.shape
        form = formats.pop() if len(formats) == 1 else None
        if self.keeps is None or form is None or not self.keeps(form, width, size, module.weight.dtype):
            return None
        return form


class LinearFilling:
    """Weight of one layer while its parts are read."""

    def __init__(self, module: Linear, forms: WeightForms, parts: Iterable[WeightSlice]) -> None:
        self._module, self._forms = module, forms
        self._parts = [part for part in parts if part.target.is_meta]
        self._left = len(self._parts)
        self._levels: Levels | None = None

    def read(self, checkpoint: Checkpoint, part: WeightSlice) -> None:
        """Read one of the parts."""
        module, forms = self._module, self._forms
        if self._left == len(self._parts):
            formats = {checkpoint.level_format(each.name, each.source) for each in self._parts}
            form = forms.stored(module, formats)
            if form is None:
                allocate(module, forms.device)
            else:
                self._levels = Levels.empty(form, module.weight.shape, forms.device)
        rows = _rows(part.target)
        if self._levels is None:
            checkpoint.read_into(module.weight[rows], part.name, part.source)
        else:
            checkpoint.read_levels_into(self._levels[rows], part.name, part.source)
        self._filled()

    def fill(self, part: WeightSlice, values: Callable[[Tensor], object]) -> None:
        """Fill one of the parts by a function of its memory."""
        allocate(self._module, self._forms.device)
        values(self._module.weight[_rows(part.target)])
        self._filled()

    def _filled(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._module.levels = self._levels or self._round()

    def _round(self) -> Levels | None:
        module, tp = self._module, self._forms.tp
        form = self._forms.rounded(module)
        if form is None or form.kind == "int4":
            return None
        largest = largest_of_rows(module.weight)
        if isinstance(module, RowParallelLinear) and tp.size > 1:
            largest = tp.all_gather(largest).amax(1, keepdim=True)
        levels = levels_of_8_bits(module.weight, form.kind, largest)
        module.weight = unallocated(*module.weight.shape, dtype=module.weight.dtype)
        return levels


def _rows(part: Tensor) -> slice:
    """Rows of a matrix that a part of it is."""
    start = part.storage_offset() // part.stride(0)
    return slice(start, start + len(part))

"""Loads the matrices of a mixture's experts: packed part by part as they are read where a GPU reads them quantized.

Besides the packed matrices only one part is in memory at a time, or, of experts that are rounded (`--quantization`),
one layer's experts in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from minisgl.layers.linear import allocate, unallocated
from minisgl.layers.mlp import Experts
from minisgl.layers.weight_slice import ExpertSlice, WeightSlice
from minisgl.models.weights.checkpoint import Checkpoint, naming
from minisgl.models.weights.forms import WeightForms
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.random_levels import random_levels
from minisgl.quantization.rounding import levels_of_8_bits


class ExpertLoader:
    """Matrices of one layer's experts while their parts are read."""

    def __init__(self, experts: Experts, forms: WeightForms, parts: Iterable[WeightSlice]) -> None:
        self._experts, self._forms = experts, forms
        self._parts = [part for part in parts if isinstance(part, ExpertSlice)]
        self._left = len(self._parts)

    def read(self, checkpoint: Checkpoint, part: WeightSlice) -> None:
        """Read one of the parts."""
        assert isinstance(part, ExpertSlice)
        if self._left == len(self._parts):
            self._choose({checkpoint.level_format(each.name, each.source) for each in self._parts})
        packed = self._packed(part)
        if packed is None:
            checkpoint.read_into(self._dense(part), part.name, part.source)
        else:
            each = checkpoint.expert_levels(part.name, part.source, packed.format, self._forms.device)
            for expert, levels in enumerate(each, part.first):
                self._fill(packed, expert, part, levels)
        self._part_loaded()

    def draw(self, part: WeightSlice, stored: LevelFormat | None, std: float, generator: torch.Generator) -> None:
        """Fill one of the parts with random values, in the checkpoint's format."""
        assert isinstance(part, ExpertSlice)
        if self._left == len(self._parts):
            self._choose({stored})
        packed = self._packed(part)
        if packed is None:
            self._dense(part).normal_(std=std, generator=generator)
        else:
            rows, size = len(range(*part.rows.indices(packed.shape[1]))), packed.shape[2]
            for expert in range(part.first, part.first + (part.target.shape[0] if part.target.ndim == 3 else 1)):
                levels = random_levels(packed.format, torch.Size((rows, size)), std, generator)
                self._fill(packed, expert, part, levels)
        self._part_loaded()

    def _choose(self, formats: set[LevelFormat | None]) -> None:
        """Pack experts whose parts all have one format, which is kept; give others their memory."""
        form = self._forms.stored_experts(self._experts, formats)
        if form is None:
            allocate(self._experts, self._forms.device)
        else:
            self._experts.packed = self._empty(form)

    def _empty(self, form: LevelFormat) -> tuple[PackedExperts, PackedExperts]:
        w13, w2 = self._experts.w13, self._experts.w2
        (count, width, hidden), dtype, device = w13.shape, w13.dtype, self._forms.device
        first = PackedExperts.empty(form, (count, width, hidden), dtype, device, gated=True)
        return first, PackedExperts.empty(form, (count, hidden, w2.shape[2]), dtype, device, gated=False)

    def _packed(self, part: ExpertSlice) -> PackedExperts | None:
        packed = self._experts.packed
        return None if packed is None else packed[0 if part.gated else 1]

    def _dense(self, part: ExpertSlice) -> Tensor:
        """Return the memory that a part fills: its target is a view of the weight on the meta device."""
        weight, target = self._experts.w13 if part.gated else self._experts.w2, part.target
        return weight.as_strided(target.shape, target.stride(), int(target.storage_offset()))

    @staticmethod
    def _fill(packed: PackedExperts, expert: int, part: ExpertSlice, levels: Levels) -> None:
        with naming(part.name):
            packed.fill(expert, part.rows, levels)

    def _part_loaded(self) -> None:
        self._left -= 1
        if self._left == 0 and self._experts.packed is None:
            self._round()

    def _round(self) -> None:
        """Round dense experts and pack them, if they are kept so."""
        experts, method = self._experts, self._forms.method
        form = self._forms.rounded_experts(experts)
        if form is None or method is None or method == "int4":
            return
        packed = self._empty(form)
        share = experts.share
        for name, target, halves in (
            ("w13", packed[0], (slice(0, share), slice(share, 2 * share))),
            ("w2", packed[1], (slice(0, experts.hidden_size),)),
        ):
            weight: Tensor = getattr(experts, name)
            divided = name == "w2" and not experts.whole
            largest = self._forms.largest_of_rows(weight.flatten(0, 1), divided=divided).view(*weight.shape[:2], 1)
            for expert in range(len(weight)):
                for rows in halves:
                    levels = levels_of_8_bits(weight[expert, rows], method, largest[expert, rows])
                    target.fill(expert, rows, levels)
            setattr(experts, name, unallocated(*weight.shape, dtype=weight.dtype))
        experts.packed = packed

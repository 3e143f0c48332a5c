"""Integers packed into words of 32 bits, with a scale and a zero point for groups of input columns."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.matrix import (
    StoredTensor,
    check_shape,
    cuts,
    matrix_shape,
    read_scales,
    units,
    unpack,
    within,
)
from minisgl.quantization.schemes import AwqWeights, GptqWeights, PackedWeights

_AWQ_BITS, _AWQ_WORD = 4, 8
_LARGEST_GROUP = 128  # largest group in `Levels`; a larger one is stored as several with equal scales
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device="cpu")  # index in a word of each of its eight columns


class GroupedIntegers(ABC):
    """Implements QuantizedMatrix: (code - zero point) * scale, where `group` input columns share scale and zero point.

    `g_idx` int32 [in] is the group of each input column; without it groups are in order.
    """

    def __init__(
        self, shape: tuple[int, int], bits: int, group_size: int, g_idx: StoredTensor | None, *, zeros: bool
    ) -> None:
        """`group_size`: as in the schemes, -1 for one group."""
        self.shape = shape
        self._bits, self._g_idx, self._has_zeros = bits, g_idx, zeros
        self._group = shape[1] if group_size == -1 else group_size
        self._num_groups = -(-shape[1] // self._group)
        if g_idx is not None:
            check_shape("g_idx", g_idx, shape[1])

    @abstractmethod
    def _codes(self, rows: slice, columns: slice) -> Tensor:
        """float32 [rows, columns]"""

    @abstractmethod
    def _zeros(self, rows: slice, groups: slice) -> Tensor | None:
        """float32 [rows, groups]; None: the middle of the range."""

    @abstractmethod
    def _scales(self, rows: slice, groups: slice) -> Tensor:
        """float32 [rows, groups]"""

    def read(self, *index: slice) -> Tensor:
        rows, columns = index
        groups, group_of = self._groups(columns)
        values, zeros = self._codes(rows, columns), self._zeros(rows, groups)
        values.sub_(2 ** (self._bits - 1) if zeros is None else zeros[:, group_of])
        return values.mul_(self._scales(rows, groups)[:, group_of])

    def level_format(self, columns: slice) -> LevelFormat | None:
        """Return the format of these columns; groups of more than 128 columns count as several of 128.

        If groups are not in order (act-order), only all columns together have a format.
        """
        if self._bits != 4:
            return None
        order = None
        if self._g_idx is not None:
            found = self._g_idx.read().long()
            in_order = torch.arange(len(found)) // self._group
            if not torch.equal(found, in_order):
                by_group = found.argsort(stable=True)
                if (columns.start, columns.stop) != (0, len(found)) or not torch.equal(found[by_group], in_order):
                    return None
                order = tuple(by_group.tolist())
        group = self._group if self._group % _LARGEST_GROUP else _LARGEST_GROUP
        return None if cuts(columns, group) else LevelFormat("int4", group, self._has_zeros, order=order)

    def levels(self, rows: slice, columns: slice) -> Levels:
        form = self.level_format(columns)
        if form is None:
            raise ValueError("these columns have no format")
        groups, each = units(columns, self._group)
        each = each[:: form.group]
        codes, zeros = self._codes(rows, columns), self._zeros(rows, groups)
        if form.order is not None:
            codes = codes[:, torch.tensor(form.order)]
        zeros = None if zeros is None else zeros[:, each].to(torch.uint8)
        return Levels(form, codes.to(torch.uint8), self._scales(rows, groups)[:, each], zeros)

    def _groups(self, columns: slice) -> tuple[slice, Tensor]:
        """Return the groups to read for some columns, and the group of each column, counted from the first one read."""
        if self._g_idx is None:
            return units(columns, self._group)
        group_of = self._g_idx.read().long()
        in_order = torch.arange(len(group_of)) // self._group
        if not torch.equal(group_of.sort().values, in_order):
            raise ValueError(f"g_idx does not divide the columns among {self._num_groups} groups of {self._group}")
        return slice(0, self._num_groups), group_of[columns]


class AwqMatrix(GroupedIntegers):
    """Stored transposed: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out].

    The eight outputs of a word are interleaved.
    """

    def __init__(self, scheme: AwqWeights, qweight: StoredTensor, qzeros: StoredTensor, scales: StoredTensor) -> None:
        columns, words = matrix_shape("qweight", qweight)
        super().__init__((words * _AWQ_WORD, columns), _AWQ_BITS, scheme.group_size, None, zeros=True)
        check_shape("qzeros", qzeros, self._num_groups, words)
        check_shape("scales", scales, self._num_groups, words * _AWQ_WORD)
        self._qweight, self._qzeros, self._stored_scales = qweight, qzeros, scales

    def _codes(self, rows: slice, columns: slice) -> Tensor:
        return _awq_unpack(self._qweight, columns, rows)

    def _zeros(self, rows: slice, groups: slice) -> Tensor:
        return _awq_unpack(self._qzeros, groups, rows)

    def _scales(self, rows: slice, groups: slice) -> Tensor:
        return read_scales("scales", self._stored_scales, groups, rows).T


def _awq_unpack(stored: StoredTensor, part: slice, rows: slice) -> Tensor:
    """Return integers [rows, part] of words [.., out / 8]."""
    words, _ = units(rows, _AWQ_WORD)
    values = unpack(stored.read(part, words), _AWQ_BITS)
    return values.view(len(values), -1, _AWQ_WORD)[..., _AWQ_ORDER].flatten(-2)[:, within(rows, _AWQ_WORD)].T


class GptqMatrix(GroupedIntegers):
    """Stored transposed: qweight int32 [in / per word, out], qzeros int32 [groups, out / per word], scales [groups,
    out].
    """

    def __init__(
        self,
        scheme: GptqWeights,
        qweight: StoredTensor,
        qzeros: StoredTensor,
        scales: StoredTensor,
        g_idx: StoredTensor | None,
    ) -> None:
        self._zero_offset, self._per_word = scheme.zero_offset, 32 // scheme.bits
        words, rows = matrix_shape("qweight", qweight)
        super().__init__((rows, words * self._per_word), scheme.bits, scheme.group_size, g_idx, zeros=True)
        check_shape("scales", scales, self._num_groups, rows)
        check_shape("qzeros", qzeros, self._num_groups, rows // self._per_word)
        self._qweight, self._qzeros, self._stored_scales = qweight, qzeros, scales

    def _codes(self, rows: slice, columns: slice) -> Tensor:
        words, _ = units(columns, self._per_word)
        return unpack(self._qweight.read(words, rows).T, self._bits)[:, within(columns, self._per_word)]

    def _zeros(self, rows: slice, groups: slice) -> Tensor:
        words, _ = units(rows, self._per_word)
        zeros = unpack(self._qzeros.read(groups, words), self._bits)[:, within(rows, self._per_word)]
        return zeros.add_(self._zero_offset).remainder_(2**self._bits).T

    def _scales(self, rows: slice, groups: slice) -> Tensor:
        return read_scales("scales", self._stored_scales, groups, rows).T


class PackedMatrix(GroupedIntegers):
    """Matrix of compressed-tensors.

    weight_packed int32 [out, in / per word], weight_scale [out, groups], weight_zero_point int32
    [out / per word, groups] (without it the middle of the range), weight_g_idx as g_idx of GPTQ, weight_shape [2].
    """

    def __init__(
        self,
        scheme: PackedWeights,
        packed: StoredTensor,
        scale: StoredTensor,
        shape: StoredTensor,
        zero_point: StoredTensor | None,
        g_idx: StoredTensor | None,
    ) -> None:
        self._per_word = 32 // scheme.bits
        check_shape("weight_shape", shape, 2)
        rows, columns = (int(size) for size in shape.read().tolist())
        check_shape("weight_packed", packed, rows, -(-columns // self._per_word))
        super().__init__((rows, columns), scheme.bits, scheme.group_size, g_idx, zeros=zero_point is not None)
        check_shape("weight_scale", scale, rows, self._num_groups)
        if zero_point is not None:
            check_shape("weight_zero_point", zero_point, -(-rows // self._per_word), self._num_groups)
        self._packed, self._scale, self._zero_point = packed, scale, zero_point

    def _codes(self, rows: slice, columns: slice) -> Tensor:
        words, _ = units(columns, self._per_word)
        return unpack(self._packed.read(rows, words), self._bits)[:, within(columns, self._per_word)]

    def _zeros(self, rows: slice, groups: slice) -> Tensor | None:
        if self._zero_point is None:
            return None
        words, _ = units(rows, self._per_word)
        return unpack(self._zero_point.read(words, groups).T, self._bits)[:, within(rows, self._per_word)].T

    def _scales(self, rows: slice, groups: slice) -> Tensor:
        return read_scales("weight_scale", self._scale, rows, groups)

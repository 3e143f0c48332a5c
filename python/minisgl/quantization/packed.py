"""Integers packed into words of 32 bits, with a scale and a zero point for groups of input columns."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.matrix import StoredTensor, check_shape, cuts, units, unpack, within
from minisgl.quantization.schemes import AwqWeights, GptqWeights, PackedWeights

_AWQ_BITS, _AWQ_WORD = 4, 8
_LARGEST_GROUP = 128  # columns of a scale, in levels
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device="cpu")  # place of each of a word's columns, from the low end


class AwqMatrix:
    """Implements QuantizedMatrix.

    Stored transposed: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]. The eight
    outputs of a word are interleaved.
    """

    def __init__(self, scheme: AwqWeights, qweight: StoredTensor, qzeros: StoredTensor, scales: StoredTensor) -> None:
        columns, words = qweight.shape
        self.shape = words * _AWQ_WORD, columns
        self._group = columns if scheme.group_size == -1 else scheme.group_size
        groups = -(-columns // self._group)
        check_shape("qzeros", qzeros, groups, words)
        check_shape("scales", scales, groups, words * _AWQ_WORD)
        self._qweight, self._qzeros, self._scales = qweight, qzeros, scales

    def read(self, *index: slice) -> Tensor:
        rows, columns = index
        words, _ = units(rows, _AWQ_WORD)
        groups, group_of = units(columns, self._group)
        kept = within(rows, _AWQ_WORD)
        values = _awq_unpack(self._qweight.read(columns, words))[:, kept]
        zeros = _awq_unpack(self._qzeros.read(groups, words))[:, kept]
        scales = self._scales.read(groups, rows).float()
        return ((values - zeros[group_of]) * scales[group_of]).T

    def level_format(self, columns: slice) -> LevelFormat | None:
        return _int4_format(self._group, columns, zeros=True)

    def levels(self, rows: slice, columns: slice) -> Levels:
        words, _ = units(rows, _AWQ_WORD)
        groups, _ = units(columns, self._group)
        kept = within(rows, _AWQ_WORD)
        codes = _awq_unpack(self._qweight.read(columns, words))[:, kept]
        zeros = _awq_unpack(self._qzeros.read(groups, words))[:, kept]
        scales = self._scales.read(groups, rows).T
        return _int4_levels(self.level_format(columns), codes.T, scales, zeros.T, self._group, columns)


def _awq_unpack(words: Tensor) -> Tensor:
    stored = unpack(words, _AWQ_BITS)
    return stored.view(len(stored), -1, _AWQ_WORD)[..., _AWQ_ORDER].flatten(-2)


class GptqMatrix:
    """Implements QuantizedMatrix.

    Stored transposed: qweight int32 [in / per word, out], qzeros int32 [groups, out / per word], scales [groups, out].
    g_idx int32 [in] is the group of each input; without it they are in order.
    """

    def __init__(
        self,
        scheme: GptqWeights,
        qweight: StoredTensor,
        qzeros: StoredTensor,
        scales: StoredTensor,
        g_idx: StoredTensor | None,
    ) -> None:
        self._scheme = scheme
        self._per_word = 32 // scheme.bits
        words, rows = qweight.shape
        columns = words * self._per_word
        self.shape = rows, columns
        self._group = columns if scheme.group_size == -1 else scheme.group_size
        groups = -(-columns // self._group)
        check_shape("scales", scales, groups, rows)
        check_shape("qzeros", qzeros, groups, rows // self._per_word)
        if g_idx is not None:
            check_shape("g_idx", g_idx, columns)
        self._qweight, self._qzeros, self._scales, self._g_idx = qweight, qzeros, scales, g_idx

    def read(self, *index: slice) -> Tensor:
        rows, columns = index
        bits, per_word = self._scheme.bits, self._per_word
        words, _ = units(columns, per_word)
        values = unpack(self._qweight.read(words, rows).T, bits)[:, within(columns, per_word)]
        groups, group_of = _groups(self._g_idx, columns, self._group, self._scales.shape[0])
        zero_words, _ = units(rows, per_word)
        zeros = unpack(self._qzeros.read(groups, zero_words), bits)[:, within(rows, per_word)]
        if self._scheme.zero_offset:
            zeros = (zeros + self._scheme.zero_offset) % 2**bits
        scales = self._scales.read(groups, rows).float()
        return values.sub_(zeros.T[:, group_of]).mul_(scales.T[:, group_of])

    def level_format(self, columns: slice) -> LevelFormat | None:
        return _int4_format(self._group, columns, self._g_idx, zeros=True) if self._scheme.bits == 4 else None

    def levels(self, rows: slice, columns: slice) -> Levels:
        words, _ = units(columns, self._per_word)
        codes = unpack(self._qweight.read(words, rows).T, 4)[:, within(columns, self._per_word)]
        groups, _ = units(columns, self._group)
        zero_words, _ = units(rows, self._per_word)
        zeros = unpack(self._qzeros.read(groups, zero_words), 4)[:, within(rows, self._per_word)]
        zeros = (zeros + self._scheme.zero_offset) % 16
        scales = self._scales.read(groups, rows).T
        return _int4_levels(self.level_format(columns), codes, scales, zeros.T, self._group, columns)


class PackedMatrix:
    """Implements QuantizedMatrix for compressed-tensors.

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
        self._bits, self._per_word = scheme.bits, 32 // scheme.bits
        check_shape("weight_shape", shape, 2)
        rows, columns = (int(size) for size in shape.read().tolist())
        self.shape = rows, columns
        check_shape("weight_packed", packed, rows, -(-columns // self._per_word))
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        check_shape("weight_scale", scale, rows, groups)
        if groups == 0 or columns % groups:
            raise ValueError(f"weight_scale has {groups} groups, which do not divide {columns} columns")
        self._group = columns // groups
        if zero_point is not None:
            check_shape("weight_zero_point", zero_point, -(-rows // self._per_word), groups)
        if g_idx is not None:
            check_shape("weight_g_idx", g_idx, columns)
        self._packed, self._scale, self._zero_point, self._g_idx = packed, scale, zero_point, g_idx

    def read(self, *index: slice) -> Tensor:
        rows, columns = index
        words, _ = units(columns, self._per_word)
        values = unpack(self._packed.read(rows, words), self._bits)[:, within(columns, self._per_word)]
        groups, group_of = _groups(self._g_idx, columns, self._group, self._scale.shape[1])
        if self._zero_point is None:
            values.sub_(2 ** (self._bits - 1))
        else:
            zero_words, _ = units(rows, self._per_word)
            zeros = unpack(self._zero_point.read(zero_words, groups).T, self._bits)[:, within(rows, self._per_word)]
            values.sub_(zeros.T[:, group_of])
        return values.mul_(self._scale.read(rows, groups).float()[:, group_of])

    def level_format(self, columns: slice) -> LevelFormat | None:
        zeros = self._zero_point is not None
        return _int4_format(self._group, columns, self._g_idx, zeros=zeros) if self._bits == 4 else None

    def levels(self, rows: slice, columns: slice) -> Levels:
        words, _ = units(columns, self._per_word)
        codes = unpack(self._packed.read(rows, words), 4)[:, within(columns, self._per_word)]
        groups, _ = units(columns, self._group)
        zeros = None
        if self._zero_point is not None:
            zero_words, _ = units(rows, self._per_word)
            zeros = unpack(self._zero_point.read(zero_words, groups).T, 4)[:, within(rows, self._per_word)].T
        scales = self._scale.read(rows, groups)
        return _int4_levels(self.level_format(columns), codes, scales, zeros, self._group, columns)


def _int4_format(group: int, columns: slice, g_idx: StoredTensor | None = None, *, zeros: bool) -> LevelFormat | None:
    """Return the format of columns with groups of `group`; those of larger groups are counted as smaller ones.

    `g_idx` is the group of each column: if these are not in order, all columns have a format together.
    """
    order = None
    if g_idx is not None:
        found = g_idx.read().long()
        in_order = torch.arange(len(found)) // group
        if not torch.equal(found, in_order):
            by_group = found.argsort(stable=True)
            if (columns.start, columns.stop) != (0, len(found)) or not torch.equal(found[by_group], in_order):
                return None
            order = tuple(by_group.tolist())
    if group % _LARGEST_GROUP == 0:
        group = _LARGEST_GROUP
    return None if cuts(columns, group) else LevelFormat("int4", group, zeros, order=order)


def _int4_levels(
    form: LevelFormat | None, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, columns: slice
) -> Levels:
    """codes [rows, columns], scales and zeros [rows, groups of `group` that hold the columns]."""
    if form is None:
        raise ValueError("these columns have no format")
    _, each = units(columns, group)
    each = each[:: form.group]
    if form.order is not None:
        codes = codes[:, torch.tensor(form.order)]
    zeros = None if zeros is None else zeros[:, each].to(torch.uint8)
    return Levels(form, codes.to(torch.uint8), scales[:, each].float(), zeros)


def _groups(g_idx: StoredTensor | None, columns: slice, group: int, count: int) -> tuple[slice, Tensor]:
    """Groups to read for some columns, and the group of each column, counted from the first that is read."""
    if g_idx is None:
        return units(columns, group)
    group_of = g_idx.read(columns).long()
    if len(group_of) and not 0 <= int(group_of.min()) <= int(group_of.max()) < count:
        raise ValueError(f"g_idx names groups that are not there: there are {count}")
    return slice(0, count), group_of

"""Values of packed experts as the threads of csrc/quantized_moe.cu decode them, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.quantization.expert_layout import PackedExperts

STEPS_OF_WORD = {"fp8": 1, "int8": 1, "int4": 2, "mxfp4": 2}


def expert_values(packed: PackedExperts) -> Tensor:
    """Return float32 [experts, out, in] of experts packed for bfloat16."""
    experts, width, size = packed.shape
    form, (_, tiles, chunks, _) = packed.format, packed.words.shape
    steps = STEPS_OF_WORD[form.kind]
    columns = 32 * steps
    values = torch.zeros(experts, tiles, 64, chunks, columns, dtype=torch.float64)
    words = packed.words.view(experts, tiles, chunks, 128, 4).long() & 0xFFFFFFFF
    thread = torch.arange(128)
    g, p, warp = thread % 32 // 4, thread % 4, thread // 32
    for index in range(4):
        rows = warp * 16 + g + index % 2 * 8
        word = words[..., index]
        for at in range(2 * steps):
            first = (index // 2 * steps + at // 2) * 16 + at % 2 * 8 + 2 * p
            for half in (0, 1):
                numbers = decoded(word, form.kind, at, half) * scaled(packed, warp * 8 + g, index)
                if form.kind == "int4":
                    numbers -= zero_points(packed, rows, first)
                values[:, :, rows, :, first + half] = numbers.permute(3, 0, 1, 2)
    values = values.flatten(1, 2).flatten(2)
    if form.kind != "mxfp4" and form.group:
        scales = (packed.scales & (-1 if form.kind == "fp8" else ~0xFF)).view(torch.float32).transpose(2, 3)
        values *= scales.flatten(1, 2).repeat_interleave(form.group, 2)
    order = torch.arange(width)
    if packed.gated:
        half_rows = width // 2
        order = order % half_rows // 8 * 16 + order % 8 + order // half_rows * 8
    values = values[:, order, :size]
    if packed.row_scales is not None:
        values = values * packed.row_scales.unsqueeze(2)
    return values.float()


def decoded(word: Tensor, kind: str, at: int, half: int) -> Tensor:
    """Value `at` of the halves of a word, as `decode` makes it."""
    if kind == "int8":
        return (word >> (8 * at + 16 * half) & 255).double() - 128
    if kind == "int4":
        return (word >> (4 * at + 16 * half) & 15).double()
    if kind == "mxfp4":
        moved = (word, word << 4, word >> 6 | word << 26, None)[at]
        bits = word << 6 & 0x80C080C0 | word >> 2 & 0x01000100 if moved is None else moved & 0x81C081C0
        exponent = 126
    else:
        bits = word & 0x87F087F0 if at == 0 else word << 4 & 0x80F080F0 | word >> 4 & 0x07000700
        exponent = 120
    number = (bits >> 16 * half & 0xFFFF).to(torch.int32).to(torch.uint16).view(torch.bfloat16)
    return number.double() * 2.0**exponent


def scaled(packed: PackedExperts, group_row: Tensor, index: int) -> Tensor | float:
    """Powers of two of mxfp4: a byte of a thread's word for each of its words."""
    if packed.format.kind != "mxfp4":
        return 1.0
    exponents = packed.scales[..., group_row, index].double()
    return torch.exp2(exponents - 127 - 126)


def zero_points(packed: PackedExperts, rows: Tensor, first: Tensor) -> Tensor:
    """Zero points [experts, tiles, chunks, threads] of a chunk's columns from `first` on."""
    chunks = torch.arange(packed.words.shape[2])[:, None]
    groups = (chunks * 64 + first) // packed.format.group
    return (packed.scales[:, :, groups, rows] & 0xFF).double()

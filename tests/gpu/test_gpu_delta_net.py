"""Gated DeltaNet on a GPU: the kernels' step and torch's chunks against the recurrence in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.kernel import delta_rule
from minisgl.kernel.recurrent_rows import SingleRows, recurrent_rows
from support.delta_net import by_the_book, make_layer, projection

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # of the norm of the result


def error(found: torch.Tensor, book: torch.Tensor) -> float:
    return float((found.double() - book.double()).norm() / book.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("key_heads", "value_heads"), [(4, 8), (2, 2), (2, 6)])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_a_step(dtype: torch.dtype, key_heads: int, value_heads: int, rows: int) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(rows)
    layer = make_layer(key_heads, value_heads, 128, 128, slots=20, dtype=dtype, device="cuda")
    ops = CudaOps(torch.device("cuda", 0))
    slots = torch.randperm(19, device="cuda")[:rows]
    want = layer.copy()
    for turn in range(3):
        projected = projection(layer.heads, rows, dtype, "cuda")
        positions = torch.arange(rows, device="cuda") % 3 + turn
        single = SingleRows(slots, positions)
        out = ops.delta_step(projected, layer.heads, layer.inputs, layer.memory, single)
        book = torch.cat(
            [
                by_the_book(projected[row : row + 1], want, int(slots[row]), fresh=int(positions[row]) == 0)
                for row in range(rows)
            ]
        )
        assert error(out, book) < TOLERANCE[dtype]
        assert torch.equal(layer.inputs, want.inputs)
        assert error(layer.memory, want.memory) < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = make_layer(2, 4, 128, 128, slots=5, dtype=dtype, device="cuda")
    want, lens, starts = layer.copy(), [70, 200, 3], [0, 9, 0]
    projected = projection(layer.heads, sum(lens), dtype, "cuda")
    positions = torch.cat([start + torch.arange(length) for start, length in zip(starts, lens, strict=True)]).cuda()
    slots = torch.tensor([3, 0, 2], device="cuda")
    rows = recurrent_rows(
        np.array(lens, dtype=np.int32), slots, positions, 3, lambda array: torch.from_numpy(array).cuda()
    ).chunked
    assert rows is not None
    out = torch.empty(len(projected), 4 * 128, dtype=dtype, device="cuda")
    out[rows.tokens] = delta_rule.chunks(projected[rows.tokens], layer.heads, layer.inputs, layer.memory, rows)
    book = torch.cat(
        [
            by_the_book(part, want, int(slot), fresh=start == 0)
            for part, slot, start in zip(projected.split(lens), slots, starts, strict=True)
        ]
    )
    assert error(out, book) < TOLERANCE[dtype]
    assert error(layer.memory, want.memory) < 1e-4

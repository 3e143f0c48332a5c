"""Gated DeltaNet on a GPU: steps and chunks, by the kernels and by torch, against the recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from minisgl.kernel.base import Norm
from minisgl.kernel.delta_net.recurrent_rows import RecurrentRows, SingleRows, captured_rows, recurrent_rows
from minisgl.kernel.torch_ops import TorchOps
from support.delta_net import Layer, by_the_book, make_layer, projection

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # relative to the norm of the result


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
        out = torch.empty(rows, value_heads * 128, dtype=dtype, device="cuda")
        ops.delta_step(projected, layer.heads, layer.inputs, layer.memory, SingleRows(slots, positions), out)
        book = torch.cat(
            [
                by_the_book(projected[row : row + 1], want, int(slots[row]), fresh=int(positions[row]) == 0)
                for row in range(rows)
            ]
        )
        assert error(out, book) < TOLERANCE[dtype]
        assert torch.equal(layer.inputs, want.inputs)
        assert error(layer.memory, want.memory) < 1e-5


def rows_of(lens: list[int], starts: list[int], slots: torch.Tensor) -> RecurrentRows:
    positions = torch.cat([start + torch.arange(length) for start, length in zip(starts, lens, strict=True)]).cuda()
    return recurrent_rows(np.array(lens, dtype=np.int32), slots, positions, 3, lambda one: torch.from_numpy(one).cuda())


def captured_rows_of(lens: list[int], starts: list[int], slots: torch.Tensor) -> RecurrentRows:
    """Return the layout that a graph uses, with two empty rows in a slot that is in use."""
    positions = torch.cat([start + torch.arange(length) for start, length in zip(starts, lens, strict=True)]).cuda()
    query_starts = torch.tensor([0, *np.cumsum(lens), sum(lens), sum(lens)], dtype=torch.int32, device="cuda")
    return captured_rows(query_starts, torch.cat((slots, slots[:1], slots[:1])), positions)


def book_of(
    projected: torch.Tensor, layer: Layer, lens: list[int], starts: list[int], slots: torch.Tensor
) -> torch.Tensor:
    rows = zip(projected.split(lens), slots, starts, strict=True)
    return torch.cat([by_the_book(part, layer, int(slot), fresh=start == 0) for part, slot, start in rows])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_chunks(dtype: torch.dtype, engine: str) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    layer = make_layer(2, 4, 128, 128, slots=5, dtype=dtype, device="cuda")
    want, lens, starts = layer.copy(), [70, 200, 3], [0, 9, 0]
    projected = projection(layer.heads, sum(lens), dtype, "cuda")
    slots = torch.tensor([3, 0, 2], device="cuda")
    rows = rows_of(lens, starts, slots).chunked
    assert rows is not None
    out = torch.empty(len(projected), 4 * 128, dtype=dtype, device="cuda")
    ops = TorchOps() if engine == "torch" else CudaOps(torch.device("cuda", 0))
    ops.delta_chunks(projected, layer.heads, layer.inputs, layer.memory, rows, out)
    book = book_of(projected, want, lens, starts, slots)
    assert error(out, book) < TOLERANCE[dtype]
    assert error(layer.memory, want.memory) < 1e-4
    assert torch.equal(layer.inputs, want.inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(4, 8), (2, 2), (2, 6)])
@pytest.mark.parametrize("lens", [[2], [63], [64], [65], [129, 1, 64, 2, 1, 17, 300]], ids=str)
@pytest.mark.parametrize("captured", [False, True])
def test_rows_in_turns_go_on(
    dtype: torch.dtype, key_heads: int, value_heads: int, lens: list[int], *, captured: bool
) -> None:
    """Prefills in two chunks, batched with decodes: the second chunk continues from the first one's states."""
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(len(lens))
    layer = make_layer(key_heads, value_heads, 128, 128, slots=9, dtype=dtype, device="cuda")
    ops, want = CudaOps(torch.device("cuda", 0)), layer.copy()
    slots = torch.randperm(9, device="cuda")[: len(lens)]
    for starts in ([0] * len(lens), lens):
        projected = projection(layer.heads, sum(lens), dtype, "cuda")
        rows = captured_rows_of(lens, starts, slots) if captured else rows_of(lens, starts, slots)
        out = torch.full((len(projected), value_heads * 128), torch.nan, dtype=dtype, device="cuda")
        assert rows.chunked is not None
        ops.delta_chunks(projected, layer.heads, layer.inputs, layer.memory, rows.chunked, out)
        if rows.single is not None:
            ops.delta_step(projected, layer.heads, layer.inputs, layer.memory, rows.single, out)
        book = book_of(projected, want, lens, starts, slots)
        assert error(out, book) < TOLERANCE[dtype]
        assert error(layer.memory, want.memory) < 1e-4
        assert torch.equal(layer.inputs, want.inputs)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_steps_follow_products_in_a_graph(rows: int) -> None:
    """Each kernel begins before its predecessor ends: the same bits as one at a time, at every replay."""
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    ops = CudaOps(torch.device("cuda", 0))
    layers = [make_layer(4, 8, 128, 128, slots=64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    width = projection(layers[0].heads, 1, torch.bfloat16, "cuda").shape[1]
    into = [(torch.randn(width, 2048, device="cuda") / 45).bfloat16() for _ in layers]
    back = [(torch.randn(2048, 1024, device="cuda") / 32).bfloat16() for _ in layers]
    norm = Norm(torch.rand(2048, device="cuda") + 0.5, 1e-6)
    start = torch.zeros(rows, 2048, device="cuda", dtype=torch.bfloat16)
    single = SingleRows(torch.arange(rows, device="cuda"), torch.ones(rows, dtype=torch.int64, device="cuda"))

    def step(pause: Callable[[], object]) -> torch.Tensor:
        x = start.clone()
        for layer, first, last in zip(layers, into, back, strict=True):
            pause()
            projected = ops.norm_linear(x, norm, first)
            pause()
            out = torch.empty(rows, 1024, device="cuda", dtype=torch.bfloat16)
            ops.delta_step(projected, layer.heads, layer.inputs, layer.memory, single, out)
            pause()
            x = ops.linear(out, last, None, x)
        return x

    step(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(lambda: None)
    for _ in range(10):
        start.normal_()
        before = [layer.copy() for layer in layers]
        expected = step(torch.cuda.synchronize)
        memories = [layer.memory.clone() for layer in layers]
        for layer, copy in zip(layers, before, strict=True):
            layer.inputs.copy_(copy.inputs), layer.memory.copy_(copy.memory)
        graph.replay()
        assert torch.equal(out, expected)
        assert all(torch.equal(layer.memory, memory) for layer, memory in zip(layers, memories, strict=True))

"""The kernels of csrc/all_reduce.cu with 2, 4 and 8 ranks that share one GPU, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from support.gpus import sum_over_ranks

pytestmark = pytest.mark.gpu

EMPTY = -(2**31)
ONE_SHOT, TWO_SHOT = (1 << 19, 0), (0, 1 << 19)  # PushSizes


@dataclass(frozen=True)
class SharedGpu:
    """Memory of all ranks on one GPU."""

    words: Tensor  # int32 [ranks, n]
    addresses: Tensor


class Ranks:
    def __init__(self, ranks: int, sizes: tuple[int, int], timeout_s: float = 20.0) -> None:
        from minisgl.kernel.collectives.all_reduce import LaunchShape, PushAllReduce, PushSizes
        from minisgl.kernel.launch.compile import Compiler

        device, limits = torch.device("cuda", 0), PushSizes(*sizes)
        words = torch.full((ranks, 3 * limits.buffer_bytes(ranks) // 4), EMPTY, dtype=torch.int32, device=device)
        memory = SharedGpu(words, torch.tensor([row.data_ptr() for row in words], device=device))
        compiler = Compiler(device)
        shape = LaunchShape(threads=128, max_blocks=8)  # the blocks of all ranks must run at a time
        self.sides = [
            PushAllReduce(compiler, rank, memory, limits, timeout_s=timeout_s, shape=shape) for rank in range(ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        torch.cuda.synchronize()

    def __call__(self, values: Sequence[Tensor], residual: Tensor | None = None) -> list[Tensor]:
        """Sum copies of the values, and return what each rank has then."""
        got = [value.clone() for value in values]
        torch.cuda.synchronize()
        for side, stream, x in zip(self.sides, self.streams, got, strict=True):
            with torch.cuda.stream(stream):
                side(x, residual)
        torch.cuda.synchronize()
        return got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [ONE_SHOT, TWO_SHOT], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_gets_the_sum_bit_for_bit(ranks: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """The number of vectors is no multiple of ranks, blocks or threads; sizes alternate, so that buffers are reused."""
    torch.manual_seed(ranks)
    group = Ranks(ranks, sizes)
    vector = 16 // dtype.itemsize
    for vectors in (1, 3, 640, 32768, 129, 5, 4097, 7, 20001, 2, 8):
        values = [torch.randn(vectors * vector, device="cuda").to(dtype) for _ in range(ranks)]
        values[0][::3] = -0.0
        values[-1][::6] = -0.0
        for residual in (None, torch.randn_like(values[0])):
            want = sum_over_ranks(values, residual)
            first, *others = group(values, residual)
            assert torch.equal(first, want)
            assert all(torch.equal(other.view(torch.int16), first.view(torch.int16)) for other in others)
    for side in group.sides:
        side.check()


@pytest.mark.parametrize(("dtype", "norm_dtype"), [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sum_is_normed_to_the_bits_of_its_norm(ranks: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    """There are more and fewer rows than blocks, between sums that use the same buffers."""
    from minisgl.kernel.base import Norm
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(ranks)
    group, ops = Ranks(ranks, ONE_SHOT), CudaOps(torch.device("cuda", 0))
    for rows, size in ((9, 256), (21, 1024), (12, 2560)):
        norm = Norm(torch.randn(size, device="cuda").to(norm_dtype), 1e-6)
        values = [torch.randn((rows, size), device="cuda").to(dtype) for _ in range(ranks)]
        residual = torch.randn((rows, size), device="cuda").to(dtype)
        got, copies = [], [value.clone() for value in values]
        torch.cuda.synchronize()
        for side, stream, x in zip(group.sides, group.streams, copies, strict=True):
            assert side.norms(x)
            with torch.cuda.stream(stream):
                got.append(side.sum_and_norm(x, residual, norm))
        torch.cuda.synchronize()
        total = sum_over_ranks(values, residual)
        wanted = ops.rms_norm(total, norm)
        assert all(torch.equal(x, total) and torch.equal(normed, wanted) for x, normed in got)
        assert all(torch.equal(x, total) for x in group(values, residual))
    for side in group.sides:
        side.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_products_are_summed_to_the_bits_of_separate_sums(ranks: int, dtype: torch.dtype) -> None:
    """Products that write to their peers, in clusters and without, with and without a norm, between other sums."""
    from minisgl.kernel.base import Norm
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(ranks)
    group, ops = Ranks(ranks, ONE_SHOT), CudaOps(torch.device("cuda", 0))
    for rows, width, size in ((1, 2560, 4096), (3, 256, 512), (8, 2560, 4096), (13, 1024, 768)):
        norm = Norm(torch.randn(width, device="cuda").to(dtype), 1e-6)
        inputs = [torch.randn((rows, size), device="cuda").to(dtype) for _ in range(ranks)]
        weights = [(torch.randn((width, size), device="cuda") * 0.02).to(dtype) for _ in range(ranks)]
        residual = torch.randn((rows, width), device="cuda").to(dtype)
        parts = [ops.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)]
        total = sum_over_ranks(parts, residual)
        for one in (norm, None):
            got, copies = [], [residual.clone() for _ in range(ranks)]
            torch.cuda.synchronize()
            for rank, (side, stream) in enumerate(zip(group.sides, group.streams, strict=True)):
                assert side.multiplies(inputs[rank], weights[rank], copies[rank])
                with torch.cuda.stream(stream):
                    got.append(side.product_sum(inputs[rank], weights[rank], copies[rank], one))
            torch.cuda.synchronize()
            assert all(torch.equal(x, total) for x, _ in got)
            if one is not None:
                wanted = ops.rms_norm(total, one)
                assert all(normed is not None and torch.equal(normed, wanted) for _, normed in got)
            assert all(torch.equal(x, total) for x in group(parts, residual))
    for side in group.sides:
        side.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_gets_all_columns(ranks: int, dtype: torch.dtype) -> None:
    """Gathers alternate with sums, which use the same buffers; the last rank's columns are padded."""
    torch.manual_seed(ranks)
    group = Ranks(ranks, ONE_SHOT)
    for rows, columns, missing in ((1, 1024, 0), (5, 72, 8), (33, 200, 16), (1, 8, 0)):
        width = ranks * columns - missing
        values = [torch.randn((rows, columns), device="cuda").to(dtype) for _ in range(ranks)]
        outs = [torch.empty((rows, width), device="cuda", dtype=dtype) for _ in range(ranks)]
        torch.cuda.synchronize()
        for side, stream, x, out in zip(group.sides, group.streams, values, outs, strict=True):
            assert side.gathers(x, width)
            with torch.cuda.stream(stream):
                side.gather(x, width, out)
        torch.cuda.synchronize()
        wanted = torch.cat(values, dim=1)[:, :width]
        assert all(torch.equal(out, wanted) for out in outs)
        total = sum_over_ranks(values)
        assert all(torch.equal(got, total) for got in group(values))


@pytest.mark.parametrize("sizes", [ONE_SHOT, TWO_SHOT], ids=["one_shot", "two_shot"])
def test_a_rank_that_does_not_come_is_named(sizes: tuple[int, int]) -> None:
    group = Ranks(4, sizes, timeout_s=0.2)
    x = torch.ones(4096, device="cuda")
    for rank in (0, 1, 3):
        with torch.cuda.stream(group.streams[rank]):
            group.sides[rank](x.clone())
    torch.cuda.synchronize()
    for rank in (0, 1, 3):
        with pytest.raises(RuntimeError, match="rank 2 did not come to an all-reduce"):
            group.sides[rank].check()
    with torch.cuda.stream(group.streams[0]):
        group.sides[0](x.clone())  # a later all-reduce does not wait again
    torch.cuda.synchronize()


def test_an_abort_ends_a_call_that_waits() -> None:
    group = Ranks(2, ONE_SHOT, timeout_s=1000.0)
    with torch.cuda.stream(group.streams[0]):
        group.sides[0](torch.ones(4096, device="cuda"))
    group.sides[0].abort()
    torch.cuda.synchronize()
    group.sides[0].check()

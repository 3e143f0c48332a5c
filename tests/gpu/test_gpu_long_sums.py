"""csrc/long_sum.cu with 2, 4 and 8 ranks that share one GPU, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from minisgl.kernel.base import Norm
from support.gpus import sum_over_ranks

pytestmark = pytest.mark.gpu

WIDTH = 5120


@dataclass(frozen=True)
class SharedGpu:
    """A rank's memory on the GPU of all ranks."""

    words: Tensor
    addresses: Tensor


class Ranks:
    """Long sums of each rank. The blocks of all ranks must run at a time, so there are few."""

    def __init__(
        self, ranks: int, tokens: int, *, width: int = WIDTH, dtype: torch.dtype, timeout_s: float = 20.0
    ) -> None:
        from minisgl.kernel.collectives.long_sums import LongSums
        from minisgl.kernel.launch.compile import Compiler

        device = torch.device("cuda", 0)
        size = LongSums.bytes_for(tokens, width, dtype) // 4
        words = torch.zeros((ranks, size), dtype=torch.int32, device=device)
        addresses = torch.tensor([row.data_ptr() for row in words], device=device)
        self.status = [torch.zeros(2, dtype=torch.int32, pin_memory=True) for _ in range(ranks)]
        compiler = Compiler(device)
        self.sides = [
            LongSums(
                compiler,
                SharedGpu(words[rank], addresses),
                {
                    "rank": rank,
                    "status": self.status[rank],
                    "failed": torch.zeros(1, dtype=torch.int32, device=device),
                    "patience": int(timeout_s * 1e9),
                },
                sizes=range(1, tokens + 1),
                width=width,
                dtype=dtype,
                max_blocks=8,
            )
            for rank in range(ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        torch.cuda.synchronize()

    def add(self, rank: int, x: Tensor, residual: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
        """Return the sum of a rank's x, as `NcclTP.all_reduce_norm` does."""
        part = self.sides[rank].part_like(residual)
        assert part is not None
        return self.sides[rank].add(part.copy_(x), residual, norm)

    def each(self) -> Iterator[int]:
        """Yield each rank, with its stream as the current one."""
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                yield rank


def own_rows(rank: int, ranks: int, rows: int) -> slice:
    share = -(-rows // ranks)
    return slice(rank * share, max(min((rank + 1) * share, rows), rank * share))


@pytest.mark.parametrize(
    ("dtype", "norm_dtype"),
    [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2, (torch.float32,) * 2],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_have_the_bits_of_separate_operations(ranks: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    """Each rank has the norms of all rows and the new residual of its own; without a norm it has all of the residual.

    There are more and fewer rows than ranks and blocks.
    """
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(ranks)
    width = 1024 if dtype == torch.float32 else WIDTH
    group, ops = Ranks(ranks, 1200, width=width, dtype=dtype), CudaOps(torch.device("cuda", 0))
    norm = Norm(torch.randn(width, device="cuda").to(norm_dtype), 1e-6)
    for rows in (1200, 1, ranks - 1, 37, 513, 1199, 64):
        for one in (norm, None):
            parts = [torch.randn((rows, width), device="cuda").to(dtype) for _ in range(ranks)]
            residual = torch.randn((rows, width), device="cuda").to(dtype)
            own = [residual.clone() for _ in range(ranks)]
            torch.cuda.synchronize()
            found = [group.add(rank, parts[rank], own[rank], one) for rank in group.each()]
            torch.cuda.synchronize()
            total = sum_over_ranks(parts, residual)
            for rank, (summed, normed) in enumerate(found):
                mine = own_rows(rank, ranks, rows)
                if one is None:
                    assert normed is None
                    assert torch.equal(summed, total)
                else:
                    assert summed is own[rank]
                    assert torch.equal(summed[mine], total[mine])
                    assert normed is not None
                    assert torch.equal(normed, ops.rms_norm(total, one))


def test_graphs_replay_sums() -> None:
    """Sums of several calls in a graph, replayed with other values and between eager calls."""
    ranks, rows, dtype = 4, 300, torch.bfloat16
    group = Ranks(ranks, rows, dtype=dtype)
    norm = Norm(torch.ones(WIDTH, device="cuda", dtype=dtype), 1e-6)
    parts = [torch.zeros((rows, WIDTH), device="cuda", dtype=dtype) for _ in range(ranks)]
    start = torch.zeros((rows, WIDTH), device="cuda", dtype=dtype)
    residuals = [start.clone() for _ in range(ranks)]
    outs = [torch.empty_like(start) for _ in range(ranks)]
    torch.cuda.synchronize()

    def run(rank: int) -> None:
        residuals[rank].copy_(start)
        for _ in range(3):
            group.add(rank, parts[rank], residuals[rank], norm)
        outs[rank].copy_(group.add(rank, parts[rank], residuals[rank], None)[0])

    for rank in group.each():
        run(rank)
    torch.cuda.synchronize()
    graphs = []
    for rank in group.each():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            run(rank)
        graphs.append(graph)
    for turn in range(20):
        for part in (*parts, start):
            part.normal_()
        torch.cuda.synchronize()
        for rank in group.each():
            graphs[rank].replay() if turn % 5 else run(rank)
        torch.cuda.synchronize()
        wanted = start
        for _ in range(4):
            wanted = sum_over_ranks(parts, wanted)
        assert all(torch.equal(out, wanted) for out in outs)


def test_a_rank_that_does_not_come_is_named() -> None:
    group = Ranks(4, 64, dtype=torch.bfloat16, timeout_s=0.2)
    x = torch.ones((64, WIDTH), device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for rank in group.each():
        if rank != 2:
            group.add(rank, x, x.clone(), None)
            group.add(rank, x, x.clone(), None)  # it does not wait again
    torch.cuda.synchronize()
    assert [int(status[1]) for status in group.status] == [3, 3, 0, 3]


def test_an_abort_ends_a_sum_that_waits() -> None:
    group = Ranks(2, 64, dtype=torch.bfloat16, timeout_s=1000.0)
    x = torch.ones((64, WIDTH), device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(group.streams[0]):
        group.add(0, x, x.clone(), None)
    group.status[0][0] = 1
    torch.cuda.synchronize()
    assert group.status[0].tolist() == [1, 0]

"""Microseconds of an all-reduce by size: our kernels compared with NCCL, each 20 times in a CUDA graph.

The lower bound is the time of the bytes that any all-reduce must send from each GPU, 2 (N - 1) / N of the tensor, at
NVLink's 450 GB/s. `--algorithms` also times our one-shot and two-shot kernels at every size: where they cross are the
limits in `minisgl.kernel.collectives.all_reduce.PUSH_SIZES`.

    python benchmark/all_reduce.py --ranks 2
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from measuring.arguments import check_gpus, integers
from measuring.ranks import run_ranks
from measuring.report import table
from minisgl.distributed.nccl import NcclTP

CALLS = 20  # in a graph
RUNS = 15
NVLINK_BYTES = 450e3  # a microsecond and direction, of an H100 or H200
SIZES = (4096, 10240, 32768, 81920, 131072, 262144, 655360, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20)


def microseconds(add_up: Callable[[Tensor], object], x: Tensor) -> float:
    """Return the time of one call, the median of graphs of them; all ranks call this at the same time."""
    for _ in range(2):
        add_up(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            add_up(x)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    times: list[float] = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def algorithms(max_bytes: int, tp: NcclTP, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return our algorithms, each for all tensors of up to so many bytes; all ranks call this at the same time."""
    from minisgl.kernel.collectives.all_reduce import PushSizes, connect_push  # needs CUDA's packages

    assert dist.group.WORLD is not None
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, sizes in ("one shot us", PushSizes(max_bytes, 0)), ("two shots us", PushSizes(0, max_bytes)):
        push = connect_push(dist.group.WORLD, device, tp.smallest, timeout_s=20.0, sizes=sizes)
        if push is not None:  # otherwise the log says why
            found[name] = push
    return found


def run_rank(rank: int, ranks: int, sizes: tuple[int, ...], by_algorithm: bool, meeting: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tp = NcclTP.connect(rank=rank, size=ranks, init_method=meeting, device=device)
    timed: dict[str, Callable[[Tensor], object]] = {"Minisgl us": tp.all_reduce, "NCCL us": dist.all_reduce}
    if by_algorithm:
        timed |= algorithms(max(sizes), tp, device)
    rows = []
    for size in sizes:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        floor = 2 * (ranks - 1) / ranks * size / NVLINK_BYTES
        rows.append([size, *(microseconds(add_up, x) for add_up in timed.values()), floor])
    tp.check()
    if rank == 0:
        print(table(["bytes", *timed, "floor us"], rows))
    dist.barrier()
    tp.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="GPUs (default: 2)")
    parser.add_argument(
        "--sizes",
        type=integers,
        default=SIZES,
        metavar="SIZES",
        help="sizes of the tensors in bytes, with commas (default: 4 KiB to 16 MiB)",
    )
    parser.add_argument("--algorithms", action="store_true", help="time one-shot and two-shot at every size too")
    args = parser.parse_args()
    check_gpus(args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'rendezvous'}"
        run_ranks(run_rank, args.ranks, args.ranks, args.sizes, args.algorithms, meeting)


if __name__ == "__main__":
    main()

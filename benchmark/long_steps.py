"""Milliseconds of a prefill over several GPUs, by the kernels that sum its blocks over the ranks.

Two ways run in turns, operation by operation and, if an engine may have a graph of so many tokens, from one of exactly
this size: the all-reduces of other steps (two shots up to `PUSH_SIZES`, then NCCL), and long_sum.cu. Steps follow one
another without a pause, so an eager step takes as long as its launches where these are slower than the GPU.

    python benchmark/long_steps.py --ranks 4 --shapes 32b,14b
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from measuring.arguments import check_gpus, integers
from measuring.ranks import run_ranks
from measuring.report import table
from measuring.shapes import SHAPES, make_shape
from minisgl.config import ServerConfig
from minisgl.core import Batch
from minisgl.distributed.nccl import NcclTP
from minisgl.engine.cuda_graphs.graphs import GraphMemory, PrefillGraphs
from minisgl.engine.cuda_graphs.sizes import PREFILL_SIZES
from minisgl.engine.engine import Engine
from minisgl.llm.keywords import read_settings
from minisgl.models.load_config import load_engine_model

if TYPE_CHECKING:  # needs CUDA's packages
    from minisgl.kernel.collectives.long_sums import LongSums

STEPS = 3  # in a row


def make_engine(folder: Path, tp: NcclTP, tokens: int) -> Engine:
    """Return an engine with random weights and pages for one prompt of so many tokens."""
    settings = {
        "model": str(folder),
        "tp_size": tp.size,
        "load_format": "dummy",
        "max_running_req": 2,
        "max_seq_len_override": tokens + 64,
        "num_page_override": 2 * (tokens // 64 + 1),
        "cuda_graph_max_bs": 0,
    }
    source, config, _ = read_settings(settings)
    config = ServerConfig(source=source, engine=config, model_names=("prefill",)).located(folder, folder).engine
    model = load_engine_model(folder, config)
    engine = Engine(
        config,
        model,
        tp=tp,
        phase=lambda _: nullcontext(),
        progress=False,
        max_prefill_tokens=tokens,
        reuses_prefixes=False,
    )

    def fill() -> None:
        state = engine._runner.state
        generator = torch.Generator(state.device).manual_seed(0)
        state.tokens[0].random_(0, model.vocab_size, generator=generator)
        state.page_table[0] = torch.arange(state.page_table.shape[1], device=state.device)

    engine._queue.call(fill)
    return engine


def prefill_of(tokens: int) -> Batch:
    """Return a step that prefills one prompt."""
    return Batch(
        step=0,
        slots=np.zeros(1, dtype=np.int32),
        start_pos=np.zeros(1, dtype=np.int32),
        query_lens=np.full(1, tokens, dtype=np.int32),
        needs_sample=np.ones(1, dtype=np.bool_),
        new_pages=np.zeros((0, 3), dtype=np.int32),
    )


class Way:
    """A way to run a prefill, and its times."""

    def __init__(
        self, name: str, engine: Engine, tp: NcclTP, sums: LongSums | None, batch: Batch, *, captured: bool
    ) -> None:
        self.name, self._engine, self._tp, self._sums, self._batch = name, engine, tp, sums, batch
        self.milliseconds: list[float] = []
        self.host_milliseconds: list[float] = []
        self._graphs: PrefillGraphs | None = None
        tp._long_sums = sums
        if captured:
            self._graphs = PrefillGraphs(engine._runner, [batch.num_tokens], GraphMemory())

    def run(self) -> Tensor:
        """Launch a step and return its logits [1, vocab_size]."""
        self._tp._long_sums = self._sums
        forward = self._engine._runner.forward if self._graphs is None else self._graphs.forward
        return forward(self._batch).logits

    def measure(self, meet: Callable[[], object]) -> None:
        """Time steps that follow one another."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        meet()
        start.record()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.run()
        self.host_milliseconds.append((time.perf_counter() - begin) * 1e3 / STEPS)
        end.record()
        end.synchronize()
        self.milliseconds.append(start.elapsed_time(end) / STEPS)


def measure_size(engine: Engine, tp: NcclTP, tokens: int, runs: int, *, captured: bool) -> list[list[str | float]]:
    """Return a line for each way to run a prefill of so many tokens; all ranks call this at the same time."""
    sums, batch = tp._long_sums, prefill_of(tokens)
    if sums is None:
        raise SystemExit("these ranks cannot read one another's memory")
    kinds = {"others": None, "long": sums}
    ways = [Way(name, engine, tp, kind, batch, captured=captured) for name, kind in kinds.items()]
    logits = [way.run().float().clone() for way in ways]
    for _ in range(runs):
        for way in ways:
            way.measure(lambda: tp.smallest(1))
    tp.check()
    tp._long_sums = sums
    base = statistics.median(ways[0].milliseconds)
    lines: list[list[str | float]] = []
    for way, found in zip(ways, logits, strict=True):
        median = statistics.median(way.milliseconds)
        far = float((found - logits[0]).norm() / logits[0].norm())
        spread = (max(way.milliseconds) - min(way.milliseconds)) / median
        host = statistics.median(way.host_milliseconds)
        kind = "graph" if captured else "eager"
        lines.append(
            [tokens, kind, way.name, median, 100 * median / base, 100 * spread, host, tokens / median * 1e3, far]
        )
    return lines


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    from minisgl.kernel.collectives import all_reduce  # needs CUDA's packages

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    all_reduce.LONG_BYTES[args.ranks] = 1  # any size: where it is faster is measured here
    meeting = f"file://{folder / 'rendezvous'}"
    tp = NcclTP.connect(rank=rank, size=args.ranks, init_method=meeting, device=device, timeout_s=60.0)
    engine = make_engine(next(folder.glob("*/config.json")).parent, tp, max(args.tokens))
    header = ["tokens", "launches", "sums", "ms", "% of others", "spread %", "host ms", "tok/s", "logits differ"]
    lines: list[list[str | float]] = []
    for tokens in args.tokens:
        in_graphs = engine._runner.attention.prefill_graph_safe and tokens <= PREFILL_SIZES[-1]
        for captured in (False, True)[: 1 + in_graphs]:
            lines += engine._queue.call(partial(measure_size, engine, tp, tokens, args.runs, captured=captured))
            torch.cuda.empty_cache()
            if rank == 0:
                print(lines[-2:], flush=True)
    if rank == 0:
        print(table(header, lines), flush=True)
    engine.close()
    tp.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="GPUs (default: 2)")
    parser.add_argument(
        "--shapes", default="14b", metavar="NAMES", help=f"models, with commas: {', '.join(SHAPES)} (default: 14b)"
    )
    parser.add_argument(
        "--tokens", type=integers, default=(2048, 4096, 8192), help="lengths of the prompts (default: 2048,4096,8192)"
    )
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="turns of each way (default: 7)")
    args = parser.parse_args()
    check_gpus(args.ranks)
    for name in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make_shape(name, Path(folder))
            print(f"\n{name} over {args.ranks} GPUs", flush=True)
            run_ranks(run_rank, args.ranks, args, Path(folder))


if __name__ == "__main__":
    main()

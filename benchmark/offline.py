"""Offline throughput: output tokens per second over 256 requests of mixed lengths, and optionally latencies.

Prompts have 100 to 1024 random tokens and get 100 to 1024 tokens each, temperature 0.6, random.seed(0); `--longest`
and `--requests` make it smaller. Detokenizing counts where the engine does it. Several engines run one after the
other, each in a process of its own.

    python benchmark/offline.py --model demo --requests 32 --longest 256
    python benchmark/offline.py --shape 0.6b --engine minisgl,vllm,sglang --runs 3 --latency 1,8,64
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import Any

from latency import LatencySizes, measure_latency, timed, warm_up
from measuring.arguments import (
    add_engine_arguments,
    add_output_arguments,
    add_peer_arguments,
    check_engines,
    engine_options,
    integers,
    make_parser,
    model_folder_of,
    output_of,
    run_each_engine,
)
from measuring.engines import EngineOptions, OfflineEngine, started
from measuring.report import table
from measuring.workload import OfflineBatch, offline_batch

TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Sizes:
    """Work of every engine."""

    requests: int
    longest: int
    runs: int
    latency: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    """Figures of the offline throughput, run by run."""

    output_tokens: int
    tokens_per_second: list[float]
    tuned: str | None  # how the engine was tuned to the work


def measure_offline(engine: OfflineEngine, sizes: Sizes, vocab_size: int) -> OfflineFigures:
    """Measure output tokens per second of each run; detokenizing counts where the engine does it."""

    def work(run: int) -> OfflineBatch:
        return offline_batch(run, requests=sizes.requests, longest=sizes.longest, vocab_size=vocab_size)

    tuned = engine.prepare(work(sizes.runs), whole=False)
    rates = []
    for run in range(sizes.runs):
        batch = work(run)
        rates.append(batch.output_tokens / timed(engine, batch, TEMPERATURE, progress=True))
    return OfflineFigures(work(0).output_tokens, rates, tuned)


def measure(name: str, options: EngineOptions, sizes: Sizes) -> dict[str, Any]:
    """Return all figures of one engine."""
    rng = random.Random(4242)
    with started(name, options) as (engine, vocab_size, result):
        warm_up(engine, rng, vocab_size, rows=min(64, sizes.requests), tokens=min(300, sizes.longest))
        figures = measure_offline(engine, sizes, vocab_size)
        result["offline_tokens_per_second"] = figures.tokens_per_second
        result["output_tokens"] = figures.output_tokens
        result["tuned"] = figures.tuned
        if sizes.latency:
            latency = measure_latency(engine, rng, LatencySizes(batch_sizes=sizes.latency, prefill=()), vocab_size)
            result |= {f"batch_{size}": one for size, one in latency.decode.items()}
    return result


def print_results(results: dict[str, Any], latency: tuple[int, ...]) -> None:
    rows = []
    for name, result in results.items():
        rates = result["offline_tokens_per_second"]
        steps = [result[f"batch_{size}"].step_ms for size in latency]
        rows.append([name, statistics.median(rates), min(rates), max(rates), result["start_seconds"], *steps])
        if result["tuned"]:
            print(f"{name}: {result['tuned']}")
    batches = [f"ms/token at {size}" for size in latency]
    print(table(["engine", "tok/s", "min", "max", "start s", *batches], rows))


def main() -> None:
    parser = make_parser(__doc__)
    add_engine_arguments(parser)
    add_peer_arguments(parser)
    work = parser.add_argument_group("work")
    work.add_argument("--requests", type=int, default=256, metavar="N", help="requests of a run")
    work.add_argument("--longest", type=int, default=1024, metavar="TOKENS", help="longest prompt, and longest answer")
    work.add_argument(
        "--runs", type=int, default=3, metavar="N", help="runs of the workload, each with other token ids"
    )
    work.add_argument(
        "--latency",
        type=integers,
        default=(),
        metavar="SIZES",
        help="batch sizes at which ms per token are measured too: 1,8,64",
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    output = output_of(args)

    sizes = Sizes(args.requests, args.longest, args.runs, args.latency)
    longest = max(2 * args.longest, 1024 if args.latency else 0)
    with model_folder_of(args) as folder:
        options = engine_options(args, folder, longest, rows=max(args.latency, default=1))
        results = run_each_engine(args, measure, options, sizes, lambda results: output.save("offline", args, results))
    print_results(results, args.latency)
    if output.plot:
        from measuring.plot import plot_bars

        rates = {name: statistics.median(result["offline_tokens_per_second"]) for name, result in results.items()}
        plot_bars(output.plot, rates, f"offline, {args.requests} requests", "output tokens/s")
    check_engines(args, results)


if __name__ == "__main__":
    main()

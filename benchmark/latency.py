"""Milliseconds per token by batch size, and prefill tokens per second by prompt length.

A decode step is (time of N + 1 new tokens - time of 1) / N, for fresh random prompts, greedy, median of the repeats.
Prefill is the length of a single prompt over the time to its first token.

    python benchmark/latency.py --model demo --batch-sizes 1,8 --prompt 64 --new 32 --prefill 256,1024
    python benchmark/latency.py --shape 0.6b --engine minisgl,vllm --batch-sizes 1,8,64,256
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

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
from measuring.workload import OfflineBatch, random_prompts

WARM_UP_TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Times of one batch size: medians over repeats."""

    first_ms: float  # to the first token of all
    step_ms: float  # for each token after it


@dataclass(slots=True)
class LatencyFigures:
    """Decode steps and prefills of one engine."""

    decode: dict[int, DecodeFigures] = field(default_factory=dict)  # by batch size
    prefill_tokens_per_second: dict[int, float] = field(default_factory=dict)  # by length of a lone prompt


@dataclass(frozen=True, slots=True)
class LatencySizes:
    """Batch sizes and lengths to measure."""

    batch_sizes: tuple[int, ...] = (1, 8, 64)
    prompt_tokens: int = 512  # for decodes
    new_tokens: int = 256  # for decodes
    prefill: tuple[int, ...] = (512, 2048, 8192)
    repeats: int = 3


def timed(engine: OfflineEngine, work: OfflineBatch, temperature: float, *, progress: bool = False) -> float:
    """Return the seconds until all prompts are answered in full."""
    begin = time.perf_counter()
    made = engine.generate(work, temperature, progress=progress)
    seconds = time.perf_counter() - begin
    if made != work.output_tokens:
        raise RuntimeError(f"{made} tokens came, {work.output_tokens} were asked for")
    return seconds


def warm_up(engine: OfflineEngine, rng: random.Random, vocab_size: int, *, rows: int = 64, tokens: int = 300) -> None:
    """Trigger all work that happens only once: compilation, capture, allocation."""
    for count, length, new in ((min(8, rows), min(64, tokens), 16), (rows, tokens, 8)):
        prompts = random_prompts(rng, count, length, vocab_size)
        engine.generate(OfflineBatch(prompts, [new] * count), WARM_UP_TEMPERATURE, progress=False)


def measure_latency(engine: OfflineEngine, rng: random.Random, sizes: LatencySizes, vocab_size: int) -> LatencyFigures:
    """Measure decode steps by batch size, and single prompts by length."""
    figures = LatencyFigures()
    with tqdm(total=len(sizes.batch_sizes) + len(sizes.prefill), desc="Latency", unit="size") as bar:
        for batch_size in sizes.batch_sizes:
            figures.decode[batch_size] = _measure_decode(engine, rng, batch_size, sizes, vocab_size)
            bar.update()
        for length in sizes.prefill:
            seconds = [
                timed(engine, OfflineBatch(random_prompts(rng, 1, length, vocab_size), [1]), 0.0)
                for _ in range(sizes.repeats)
            ]
            figures.prefill_tokens_per_second[length] = length / statistics.median(seconds)
            bar.update()
    return figures


def _measure_decode(
    engine: OfflineEngine, rng: random.Random, batch_size: int, sizes: LatencySizes, vocab_size: int
) -> DecodeFigures:
    """Measure (time of n + 1 new tokens - time of 1 new token) / n, for fresh prompts, greedy."""

    def works() -> Iterator[OfflineBatch]:
        for new in (1, sizes.new_tokens + 1):
            prompts = random_prompts(rng, batch_size, sizes.prompt_tokens, vocab_size)
            yield OfflineBatch(prompts, [new] * batch_size)

    engine.prepare(next(works()), whole=True)
    firsts, steps = [], []
    for _ in range(sizes.repeats):
        first, whole = (timed(engine, work, temperature=0.0) for work in works())
        firsts.append(first * 1e3)
        steps.append((whole - first) / sizes.new_tokens * 1e3)
    return DecodeFigures(statistics.median(firsts), statistics.median(steps))


def measure(name: str, options: EngineOptions, sizes: LatencySizes) -> dict[str, Any]:
    """Return all figures of one engine."""
    rng = random.Random(4242)
    with started(name, options) as (engine, vocab_size, result):
        warm_up(engine, rng, vocab_size, rows=max(sizes.batch_sizes, default=1), tokens=min(300, sizes.prompt_tokens))
        result["latency"] = measure_latency(engine, rng, sizes, vocab_size)
    return result


def print_results(results: dict[str, Any], sizes: LatencySizes) -> None:
    names = list(results)
    figures = [results[name]["latency"] for name in names]
    rows = [[size, *(one.decode[size].step_ms for one in figures)] for size in sizes.batch_sizes]
    print(table(["batch size", *(f"{name} ms/token" for name in names)], rows), end="\n\n")
    rows = [[length, *(one.prefill_tokens_per_second[length] for one in figures)] for length in sizes.prefill]
    print(table(["prompt tokens", *(f"{name} prefill tok/s" for name in names)], rows))


def main() -> None:
    default = LatencySizes()
    parser = make_parser(__doc__)
    add_engine_arguments(parser)
    add_peer_arguments(parser)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--batch-sizes", type=integers, default=default.batch_sizes, metavar="SIZES", help="rows of the decodes: 1,8,64"
    )
    work.add_argument(
        "--prompt", type=int, default=default.prompt_tokens, metavar="TOKENS", help="length of a prompt before decodes"
    )
    work.add_argument(
        "--new", type=int, default=default.new_tokens, metavar="TOKENS", help="new tokens of each sequence of a decode"
    )
    work.add_argument(
        "--prefill",
        type=integers,
        default=default.prefill,
        metavar="LENGTHS",
        help="lengths of the prompts of prefills: 512,2048,8192",
    )
    work.add_argument(
        "--repeats", type=int, default=default.repeats, metavar="N", help="times that each figure is measured"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    output = output_of(args)

    sizes = LatencySizes(args.batch_sizes, args.prompt, args.new, args.prefill, args.repeats)
    longest = max(args.prompt + args.new, *args.prefill, 1) + 64
    with model_folder_of(args) as folder:
        options = engine_options(args, folder, longest, rows=max(sizes.batch_sizes, default=1))
        results = run_each_engine(args, measure, options, sizes, lambda results: output.save("latency", args, results))
    print_results(results, sizes)
    if output.plot:
        from measuring.plot import plot_latency

        figures: dict[str, LatencyFigures] = {name: result["latency"] for name, result in results.items()}
        decode = {name: {size: at.step_ms for size, at in one.decode.items()} for name, one in figures.items()}
        plot_latency(output.plot, decode, {name: one.prefill_tokens_per_second for name, one in figures.items()})
    check_engines(args, results)


if __name__ == "__main__":
    main()

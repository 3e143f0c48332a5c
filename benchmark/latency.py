"""Milliseconds per token by batch size, and prefill tokens per second by prompt length.

A decode step is (time of N + 1 new tokens - time of 1) / N, for fresh random prompts, greedy, median of the repeats.
Prefill is the length of a lone prompt over the time to its first token.

    python benchmark/latency.py --model demo --batch-sizes 1,8 --prompt 64 --new 32 --prefill 256,1024
    python benchmark/latency.py --shape 0.6b --engine minisgl,vllm --batch-sizes 1,8,64,256
"""

from __future__ import annotations

import random
from typing import Any

from minisgl.benchmark.arguments import (
    add_engine_arguments,
    add_output_arguments,
    add_peer_arguments,
    engine_options,
    integers,
    make_parser,
    model_folder_of,
    output_of,
    run_each_engine,
)
from minisgl.benchmark.engines import EngineOptions
from minisgl.benchmark.offline import LatencySizes
from minisgl.benchmark.report import table


def measure(name: str, options: EngineOptions, sizes: LatencySizes) -> dict[str, Any]:
    """All figures of one engine."""
    from minisgl.benchmark.engines.start import started
    from minisgl.benchmark.offline import measure_latency, warm_up

    rng = random.Random(4242)
    with started(name, options) as (engine, vocab_size, result):
        warm_up(engine, rng, vocab_size, rows=max(sizes.batch_sizes, default=1), tokens=min(300, sizes.prompt_tokens))
        result["latency"] = measure_latency(engine, rng, sizes, vocab_size=vocab_size)
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
        "--batch-sizes", type=integers, default=default.batch_sizes, metavar="SIZES", help="of decode: 1,8,64"
    )
    work.add_argument("--prompt", type=int, default=default.prompt_tokens, metavar="TOKENS", help="of decode")
    work.add_argument("--new", type=int, default=default.new_tokens, metavar="TOKENS", help="of decode")
    work.add_argument(
        "--prefill", type=integers, default=default.prefill, metavar="LENGTHS", help="of prompts: 512,2048,8192"
    )
    work.add_argument("--repeats", type=int, default=default.repeats, metavar="N", help="of each measurement")
    add_output_arguments(parser)
    args = parser.parse_args()
    output = output_of(args)

    sizes = LatencySizes(args.batch_sizes, args.prompt, args.new, args.prefill, args.repeats)
    longest = max(args.prompt + args.new, *args.prefill, 1) + 64
    with model_folder_of(args) as folder:
        results = run_each_engine(args, measure, engine_options(args, folder, longest), sizes)
    print_results(results, sizes)
    output.save("latency", args, results)
    if output.plot:
        from minisgl.benchmark.plot import plot_latency

        plot_latency(output.plot, {name: result["latency"] for name, result in results.items()})


if __name__ == "__main__":
    main()

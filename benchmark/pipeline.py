"""The server without its model: tokens a second through HTTP, ZeroMQ, tokenizing and scheduling, and what they cost.

An engine that takes `--step-ms` for any step (0: no time) gives every stream a token each step; everything else is
the real server. CPU time is that of each process, the load generator's too, while all streams run. With --step-ms 0
tokens come faster than clients can be told and share events; steps of CLIENTS / 20 ms offer 20,000 tokens a second.

    python benchmark/pipeline.py
    python benchmark/pipeline.py --clients 256 --step-ms 12.8,25.6 --profile
"""

from __future__ import annotations

import argparse
import sys

from minisgl.benchmark.arguments import add_output_arguments, make_parser, numbers, output_of
from minisgl.benchmark.launch import LaunchFailed, exit_on_sigterm
from minisgl.benchmark.pipeline import PipelineFigures, PipelineLoad, measure_pipeline
from minisgl.benchmark.report import Cell, table

PROFILE_ROWS = 5


def print_results(results: list[PipelineFigures]) -> None:
    rows: list[list[Cell]] = [
        [
            f"{one.step_ms:g} ms",
            one.offered_tokens_per_second,
            one.tokens_per_second,
            one.tokens_per_event,
            one.whole_tokens_per_second,
            one.us_per_token,
            one.gap_ms.p50 if one.gap_ms else None,
            one.gap_ms.p99 if one.gap_ms else None,
            one.ttft_ms.p50 if one.ttft_ms else None,
        ]
        for one in results
    ]
    header = ["step", "offered tok/s", "tok/s", "tok/event", "whole tok/s", "CPU us/token"]
    print(table([*header, "gap p50 ms", "p99", "TTFT p50 ms"], rows))
    for one in results:
        print(f"\nstep {one.step_ms:g} ms, {one.window_seconds:.1f} s in which all streams ran")
        costs: list[list[Cell]] = [[name, cost.cores, cost.us_per_token] for name, cost in one.processes.items()]
        print(table(["process", "cores", "CPU us/token"], costs))
        for process, entries in one.profiles.items():
            shares: list[list[Cell]] = [
                [entry.where, f"{entry.own:.1%}", f"{entry.total:.1%}"] for entry in entries[:PROFILE_ROWS]
            ]
            print("\n" + table([f"{process}: function", "own", "with callees"], shares))


def main() -> None:
    default = PipelineLoad()
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="folder, hub id or demo: its tokenizer and lengths are used")
    work = parser.add_argument_group("work")
    work.add_argument("--clients", type=int, default=default.clients, metavar="N", help="streams at the same time")
    work.add_argument("--prompt", type=int, default=default.prompt_tokens, metavar="TOKENS", help="of each stream")
    work.add_argument("--output", type=int, default=default.output_tokens, metavar="TOKENS", help="of each stream")
    work.add_argument("--step-ms", type=numbers, default=(12.8,), metavar="MS", help="time of an engine's step: 0,12.8")
    work.add_argument("--processes", type=int, default=1, metavar="N", help="of the load generator")
    work.add_argument("--tokenizers", type=int, default=1, metavar="N", help="tokenizer processes of the server")
    work.add_argument("--profile", action="store_true", help="where each process spends its CPU time")
    add_output_arguments(parser)
    args = parser.parse_args()
    output = output_of(args)

    load = PipelineLoad(args.clients, args.prompt, args.output, args.processes)
    flags = ["--model", args.model, "--load-format", "dummy"] if args.model != "demo" else ["--model", "demo"]
    flags += ["--num-tokenizer", str(args.tokenizers), "--max-running-requests", str(args.clients)]
    results = [measure_pipeline(load, step, flags, profile=args.profile) for step in args.step_ms]
    print_results(results)
    output.save("pipeline", args, results)
    if output.plot:
        from minisgl.benchmark.plot import plot_bars

        last = results[-1]
        costs = {name: cost.us_per_token for name, cost in last.processes.items()}
        title = f"{last.tokens_per_second:,.0f} tokens/s to {args.clients} clients"
        plot_bars(output.plot, costs, title, "CPU us per token")


if __name__ == "__main__":
    exit_on_sigterm()
    try:
        main()
    except (LaunchFailed, argparse.ArgumentTypeError) as error:
        sys.exit(f"pipeline: error: {error}")

"""Load against an OpenAI-compatible server: latencies, throughput, goodput, cache hits.

Requests are sent on time, whatever happened to those before them, and latencies count from when they were due. Prompts
are random token ids (POST /v1/completions), answers have an exact length (`ignore_eos`) and are streamed. The load has
Poisson arrivals (`--rate`), is all at once (`--burst`), or replays a trace (`--trace`: Mooncake's JSON lines, whose
shared blocks become shared prefixes, or Azure's CSV) at `--speed` times its pace. `--concurrency` is a closed loop
instead, with this many requests at a time: each is sent when another has ended, and the first begin in the middle of
their answers. Several rates, speeds or concurrencies run one after the other. A command after `--` starts the server,
which is ended afterwards.

    python benchmark/serve.py --rate 4 --requests 50 --input 200 --output 40 -- python -m minisgl --port 0
    python benchmark/serve.py --base-url http://127.0.0.1:1919 --trace mooncake.jsonl --requests 1000 --speed 1,2,4
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path

from measuring.arguments import add_output_arguments, integers, make_parser, numbers, output_of, parse_with_command
from measuring.client import Target
from measuring.idle import IdleWatch, NotIdle
from measuring.load import run_load
from measuring.load_arguments import add_client_arguments, add_served_arguments, slo_of
from measuring.online_workloads import LENGTHS
from measuring.probe import warm_up
from measuring.report import Cell, table
from measuring.server_process import LaunchFailed, Served, ServerProcess, ask_served, exit_on_sigterm
from measuring.statistics import (
    LoadSummary,
    Spread,
    full_time,
    summarize,
    summarize_closed_loop,
    summarize_window,
)
from measuring.traces import TraceRow, read_trace, replay
from measuring.workload import Lengths, LengthSource, TimedRequest, closed_loop, poisson_arrivals, synthetic_load

IDLE_TIMEOUT = 60  # seconds for a server to come to rest before a load


def make_loads(
    args: argparse.Namespace, rows: list[TraceRow], served: Served
) -> list[tuple[str, list[TimedRequest], int]]:
    """Return the loads by name, each with the number of requests that were cut. No two loads share a prompt."""
    lengths: LengthSource = Lengths(args.input, args.output, 0.0 if args.fixed else 0.7, 0.0 if args.fixed else 0.6)
    if args.shape:
        lengths = LENGTHS[args.shape]
    limits = {"vocab_size": served.vocab_size, "context": served.context}
    loads = []
    if rows:
        for index, speed in enumerate(args.speed):
            loads.append((f"{speed:g}x", *replay(rows, speed=speed, seed=args.seed + index, **limits)))
    elif args.burst:
        loads.append(("burst", *synthetic_load(args.seed, [0.0] * args.burst, lengths, **limits)))
    elif args.concurrency:
        for index, concurrency in enumerate(args.concurrency):
            seed, count = args.seed + index, args.requests or 2 * concurrency
            load, num_cut = synthetic_load(seed, [0.0] * count, lengths, **limits)
            seeds = {"seed": seed, "vocab_size": served.vocab_size}
            loads.append((f"{concurrency} at a time", closed_loop(load, concurrency, **seeds), num_cut))
    else:
        for index, rate in enumerate(args.rate):
            seed = args.seed + index
            arrivals = poisson_arrivals(random.Random(seed), rate, args.requests or 100)
            loads.append((f"{rate:g}/s", *synthetic_load(seed, arrivals, lengths, **limits)))
    return loads


def print_summaries(summaries: dict[str, LoadSummary]) -> None:
    rows: list[list[Cell]] = [
        [
            name,
            one.requests,
            one.errors,
            one.seconds,
            one.requests_per_second,
            one.prompt_tokens_per_second,
            one.output_tokens_per_second,
            one.good_requests_per_second,
            f"{one.good_share:.1%}",
            f"{one.hit_rate:.1%}",
            one.tokens_per_event,
            one.send_delay_ms.p99 if one.send_delay_ms else None,
        ]
        for name, one in summaries.items()
    ]
    header = "load requests errors seconds req/s prompt-tok/s output-tok/s good-req/s good hits tok/event late-p99-ms"
    print(table(header.split(), rows), end="\n\n")
    latencies: list[list[Cell]] = []
    for name, one in summaries.items():
        for what, values in (
            ("TTFT", one.ttft_ms),
            ("TBT", one.tbt_ms),
            ("time per token", one.tpot_ms),
            ("end to end", one.end_to_end_ms),
        ):
            spread: Spread | None = values
            if spread is not None:
                latencies.append([name, what, spread.mean, spread.p50, spread.p90, spread.p99])
    print(table(["load", "latency, ms", "mean", "p50", "p90", "p99"], latencies))


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments and the server's command after `--`."""
    parser = make_parser(__doc__)
    server = add_served_arguments(parser)
    server.add_argument(
        "--base-url",
        metavar="URL",
        help="address of the server without /v1; none: the one that the command after -- prints",
    )
    work = parser.add_argument_group("work")
    work.add_argument(
        "--rate", type=numbers, default=(1.0,), metavar="R", help="rates of Poisson arrivals, requests a second: 2,4,8"
    )
    work.add_argument("--burst", type=int, metavar="N", help="send this many requests at once instead")
    work.add_argument(
        "--concurrency", type=integers, metavar="N", help="keep this many requests running instead: 64,256"
    )
    work.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="seconds from the first token of the last place to the end of a closed loop, which alone are judged",
    )
    work.add_argument("--trace", type=Path, metavar="FILE", help="trace to replay instead")
    work.add_argument("--speed", type=numbers, default=(1.0,), metavar="X", help="factors of the trace's pace: 1,2,4")
    work.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests to send; none: 100, the whole trace, or 2 for each place of --concurrency",
    )
    work.add_argument(
        "--input", type=int, default=1750, metavar="TOKENS", help="mean length of the prompts, log-normal"
    )
    work.add_argument(
        "--output", type=int, default=350, metavar="TOKENS", help="mean length of the answers, log-normal"
    )
    work.add_argument("--shape", choices=list(LENGTHS), help="workload of goodput.py whose lengths are used instead")
    work.add_argument("--fixed", action="store_true", help="give every prompt and answer the mean length")
    add_client_arguments(parser)
    add_output_arguments(parser)
    args, command = parse_with_command(parser)
    if not args.base_url and not command:
        parser.error("give --base-url, or a command that starts the server after --")
    if args.concurrency and args.requests and args.requests < 2 * max(args.concurrency):
        parser.error("--requests must be at least twice --concurrency: the first request of each place is not counted")
    if args.seconds is not None and (not args.concurrency or args.seconds <= 0):
        parser.error("--seconds is the time of a closed loop, --concurrency, and must be above 0")
    if args.base_url:
        args.base_url = args.base_url.rstrip("/").removesuffix("/v1")
    return args, command


def main() -> None:
    args, command = parse()
    output = output_of(args)
    rows = read_trace(args.trace, args.requests) if args.trace else []
    slo = slo_of(args)
    api_key = os.environ.get("OPENAI_API_KEY")
    summaries, all_records, cuts = {}, [], {}
    with ExitStack() as stack:
        base_url = args.base_url
        if command:
            server = stack.enter_context(
                ServerProcess(command, base_url=base_url, timeout=args.start_timeout, api_key=api_key)
            )
            base_url = server.base_url
            print(f"the server is ready after {server.start_seconds:.1f} s", file=sys.stderr)
        served = ask_served(base_url, model=args.model, context=args.context, vocab_size=args.vocab, api_key=api_key)
        target = Target(base_url, served.model, args.temperature, args.timeout, api_key)
        warm_up(target, served, args.seed)
        idle = IdleWatch(target, served.vocab_size)
        for name, load, num_cut in make_loads(args, rows, served):
            idle.wait(IDLE_TIMEOUT)
            if num_cut:
                print(f"{name}: {num_cut} of {len(load)} requests were cut to the context of {served.context} tokens")
            run = run_load(target, load, processes=args.processes, label=name, seconds=args.seconds)
            records = run.records
            for error in sorted({record.error for record in records if record.error})[:3]:
                print(f"{name}: error: {error}")
            num_first = sum(request.follows is None for request in load)
            closed = num_first < len(load)
            if run.stopped_at is not None:
                begin, end = full_time([*records, *run.cut], num_first, len(load), run.stopped_at)
                summaries[name] = summarize_window(records, run.cut, slo, begin, end)
            elif closed:
                summaries[name] = summarize_closed_loop(records, slo, num_first)
            else:
                summaries[name] = summarize(records, slo)
            cuts[name] = num_cut
            all_records.append(records)
    print_summaries(summaries)
    output.save("serve", args, {"loads": summaries, "cut_requests": cuts, "model": served.model})
    if output.plot:
        from measuring.plot import plot_loads

        plot_loads(output.plot, list(summaries), list(summaries.values()), all_records)


if __name__ == "__main__":
    exit_on_sigterm()
    try:
        main()
    except (LaunchFailed, NotIdle) as error:
        sys.exit(f"serve: error: {error}")

"""The server without its model: tokens a second through HTTP, ZeroMQ, tokenizing and scheduling, and their CPU time.

An engine that takes `--step-ms` for any step (0: no time) gives every stream a token each step; everything else is
the real server. Clients open all streams at once. Tokens and the CPU time of each process, including the load
generator's, are measured in the window in which all streams run: from the last first token to the first end of a
stream. With --step-ms 0 tokens come faster than events can be sent, so several share an event; steps of CLIENTS / 20 ms
offer 20,000 tokens a second.

    python benchmark/pipeline.py
    python benchmark/pipeline.py --clients 256 --step-ms 12.8,25.6 --profile
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from measuring.arguments import add_output_arguments, make_parser, numbers, output_of
from measuring.client import RequestRecord, Target
from measuring.load import run_load
from measuring.pipeline_server import PROFILE_DIR, STEP_MS
from measuring.profiler import ProfileEntry, read_profile
from measuring.report import Cell, table
from measuring.server_process import (
    LaunchFailed,
    ServerProcess,
    ask_served,
    cpu_seconds,
    exit_on_sigterm,
    worker_pids,
)
from measuring.statistics import Spread, spread
from measuring.workload import TimedRequest

PROFILE_ROWS = 5
FOLDER = Path(__file__).parent  # folder of the package `measuring`, for the server's processes
GENERATOR = "load generator"
PROFILE_WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """Streams that the clients open, all at once."""

    clients: int = 256
    prompt_tokens: int = 100
    output_tokens: int = 400
    processes: int = 1  # processes of the load generator


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """CPU time of one process in the window."""

    cores: float  # CPU seconds a second
    us_per_token: float  # CPU time per token


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Figures of one run at one step time."""

    step_ms: float
    offered_tokens_per_second: float | None  # all clients, one token a step; None: as fast as it can
    window_seconds: float
    tokens_per_second: float  # in the window
    tokens_per_event: float  # in the window; above 1 means that clients got several tokens at once
    whole_tokens_per_second: float  # from the first request to the last token
    ttft_ms: Spread | None
    gap_ms: Spread | None  # between the events of a stream
    us_per_token: float  # CPU time of all processes together
    processes: dict[str, ProcessCost] = field(default_factory=dict)
    profiles: dict[str, list[ProfileEntry]] = field(default_factory=dict)


def measure_pipeline(
    load: PipelineLoad, step_ms: float, server_flags: Sequence[str], *, profile: bool
) -> PipelineFigures:
    """Start the server, send the load once to warm up and once to measure, end the server."""
    with tempfile.TemporaryDirectory(prefix="minisgl-profile-") as folder:
        env = {STEP_MS: str(step_ms)} | ({PROFILE_DIR: folder} if profile else {})
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(FOLDER)]))
        command = [sys.executable, "-m", "measuring.pipeline_server", "--port", "0", *server_flags]
        with ServerProcess(command, env=env) as server:
            pids = {name.partition(":")[2]: pid for name, pid in worker_pids(server.process.pid).items()}
            served = ask_served(server.base_url)
            if load.prompt_tokens + load.output_tokens > served.context:
                raise ValueError(f"{load} does not fit into the context of {served.context} tokens")
            target = Target(server.base_url, served.model, temperature=0.0)
            warming = _requests(PipelineLoad(load.clients, load.prompt_tokens, 16), served.vocab_size, seed=1)
            _checked(run_load(target, warming, label="warm up").records)

            requests = _requests(load, served.vocab_size, seed=2)
            clock = _CpuClock(pids)
            if profile:
                _toggle_profilers(pids)
            label = f"step {step_ms:g} ms"
            run = run_load(target, requests, processes=load.processes, label=label, on_tick=clock.tick)
            records = _checked(run.records)
            profiles = _collect_profiles(Path(folder), pids) if profile else {}
    return _figures(load, step_ms, records, clock, profiles)


def _requests(load: PipelineLoad, vocab_size: int, seed: int) -> list[TimedRequest]:
    prompts = np.random.default_rng(seed).integers(0, vocab_size, (load.clients, load.prompt_tokens), dtype=np.int32)
    return [TimedRequest(0.0, prompt, load.output_tokens) for prompt in prompts]


def _checked(records: list[RequestRecord]) -> list[RequestRecord]:
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests failed, the first with: {errors[0]}")
    return records


class _CpuClock:
    """Samples the CPU seconds of every process while the load runs."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._times: list[float] = []
        self._seconds: dict[str, list[float]] = {}

    def tick(self, now: float, generators: list[int]) -> None:
        groups = {name: [pid] for name, pid in self._pids.items()} | {GENERATOR: generators}
        seconds = {name: sum(map(cpu_seconds, pids)) for name, pids in groups.items()}
        if seconds[GENERATOR] == 0.0:  # it has ended
            return
        self._times.append(now)
        for name, spent in seconds.items():
            self._seconds.setdefault(name, []).append(spent)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return CPU seconds of each process, linear between samples."""
        if not self._times:
            return {}
        return {
            name: float(np.diff(np.interp([begin, end], self._times, seconds))[0])
            for name, seconds in self._seconds.items()
        }


def _figures(
    load: PipelineLoad,
    step_ms: float,
    records: Sequence[RequestRecord],
    clock: _CpuClock,
    profiles: dict[str, list[ProfileEntry]],
) -> PipelineFigures:
    begin = max(record.times[0] for record in records)
    end = min(record.times[-1] for record in records)
    if end <= begin:  # the streams did not all run at one time
        begin, end = min(record.times[0] for record in records), max(record.times[-1] for record in records)
    times = np.concatenate([record.times for record in records])
    sizes = np.concatenate([record.sizes for record in records])
    inside = (times > begin) & (times <= end)
    tokens, events, seconds = int(sizes[inside].sum()), int(inside.sum()), end - begin
    spent = clock.between(begin, end)
    return PipelineFigures(
        step_ms=step_ms,
        offered_tokens_per_second=load.clients / step_ms * 1e3 if step_ms > 0 else None,
        window_seconds=seconds,
        tokens_per_second=tokens / seconds,
        tokens_per_event=tokens / max(1, events),
        whole_tokens_per_second=sum(record.completion_tokens for record in records) / float(times.max()),
        ttft_ms=spread([record.ttft * 1e3 for record in records]),
        gap_ms=spread((np.concatenate([np.diff(record.times) for record in records]) * 1e3).tolist()),
        us_per_token=sum(spent.values()) / tokens * 1e6,
        processes={name: ProcessCost(cpu / seconds, cpu / tokens * 1e6) for name, cpu in spent.items()},
        profiles=profiles,
    )


def _toggle_profilers(pids: Mapping[str, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)


def _collect_profiles(folder: Path, pids: Mapping[str, int]) -> dict[str, list[ProfileEntry]]:
    _toggle_profilers(pids)
    deadline = time.monotonic() + PROFILE_WAIT_SECONDS
    wanted = {name.partition("-")[0] for name in pids}
    while len(list(folder.glob("*.json"))) < len(wanted) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {path.stem: read_profile(path) for path in sorted(folder.glob("*.json"))}


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
    parser.add_argument(
        "--model",
        default="demo",
        help="folder or hub id of the model whose tokenizer and context are used; demo: the built-in one",
    )
    work = parser.add_argument_group("work")
    work.add_argument(
        "--clients", type=int, default=default.clients, metavar="N", help="streams that run at the same time"
    )
    work.add_argument(
        "--prompt", type=int, default=default.prompt_tokens, metavar="TOKENS", help="length of each prompt"
    )
    work.add_argument(
        "--output", type=int, default=default.output_tokens, metavar="TOKENS", help="length of each answer"
    )
    work.add_argument(
        "--step-ms", type=numbers, default=(12.8,), metavar="MS", help="time that the engine takes for a step: 0,12.8"
    )
    work.add_argument("--processes", type=int, default=1, metavar="N", help="processes of the load generator")
    work.add_argument("--tokenizers", type=int, default=1, metavar="N", help="tokenizer processes of the server")
    work.add_argument("--profile", action="store_true", help="show where each process spends its CPU time")
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
        from measuring.plot import plot_bars

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

r"""Search for the highest request rate at which 99% of the requests meet the objectives, on several servers.

A probe sends --warm-up and --requests requests at one rate and judges the latter; it ends early when too many missed.
The next probe, at a rate chosen by bisection, begins when the server is idle again. The service level objectives are a
time to first token by prompt length, and a mean time per token of each answer. A probe whose requests were sent too
late says nothing about the server and is refused.

Each --server is NAME=COMMAND, which is started for its turn and ended after it, or NAME=URL. Workloads: poisson (mean
1,740 tokens in, 343 out, log-normal), 1k1k, 1k8k, 8k1k (InferenceX's shapes), conversation, agent (sessions with shared
prefixes and think times), or the file of a trace (Mooncake's JSON lines, Azure's CSV), by default at 0.25 to 0.75 of
its pace. A workload's own range, requests, precision and objectives may follow its name.

    python benchmark/goodput.py --scale 0.02 --range 1,16 --slo-tpot 400 --server "demo=python -m minisgl --port 0"
    python benchmark/goodput.py --workload mooncake.jsonl --workload agent --plot goodput.png \
        --server "minisgl=python -m minisgl --model MODEL --port 0" --server "vllm=vllm serve MODEL --port 8000"
    python benchmark/goodput.py --merge one.json --merge another.json --plot both.png
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from measuring.arguments import add_output_arguments, make_parser, numbers, output_of
from measuring.client import Target
from measuring.idle import NotIdle
from measuring.load_arguments import add_client_arguments, add_served_arguments, slo_of
from measuring.online_workloads import LENGTHS, SESSIONS, OnlineWorkload, make_workload
from measuring.probe import Judgement, Probe, Prober, Search
from measuring.report import Cell, cell_text, table
from measuring.search import Verdict, bisect, num_probes
from measuring.server_process import LaunchFailed, ServerProcess, ask_served, exit_on_sigterm

SHORTEST_PROBE = 10  # times the objective for the first token
SETTLED = 2  # times the median answer in which judged requests leave: before, fewer run at once than in the long run


def parse_range(text: str) -> tuple[float, float]:
    values = numbers(text)
    if len(values) != 2 or not 0 < values[0] < values[1]:
        raise argparse.ArgumentTypeError(f"two rates above 0, the lower one first, not {text!r}")
    return values[0], values[1]


# Flags that a workload may have of its own, and how their values are read.
WORKLOAD_SETTINGS: dict[str, Callable[[str], Any]] = {
    "range": parse_range,
    "requests": int,
    "warm-up": int,
    "precision": float,
    "slo-ttft": float,
    "slo-ttft-per-1k": float,
    "slo-tpot": float,
}


@dataclass(frozen=True, slots=True)
class Task:
    """A workload, and the settings of the search for its highest rate."""

    workload: OnlineWorkload
    rates: tuple[float, float]
    requests: int  # judged in each probe
    precision: float
    rules: Judgement


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server by name: a command that starts it, or the address of a running one."""

    name: str
    command: list[str]
    base_url: str | None


def parse_contestant(text: str) -> Contestant:
    name, equals, what = text.partition("=")
    if not (name and equals and what):
        raise argparse.ArgumentTypeError(f"NAME=COMMAND or NAME=URL, not {text!r}")
    if what.startswith(("http://", "https://")):
        return Contestant(name, [], what.rstrip("/").removesuffix("/v1"))
    return Contestant(name, shlex.split(what), None)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    server = add_served_arguments(parser)
    server.add_argument(
        "--server",
        type=parse_contestant,
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="server to measure: the command that starts it, or NAME=URL; if repeated, all are measured in turns",
    )
    server.add_argument(
        "--idle-timeout",
        type=float,
        default=60,
        metavar="S",
        help="seconds that a server may take to become idle after a probe",
    )
    work = parser.add_argument_group("work")
    work.add_argument(
        "--workload",
        action="append",
        metavar="NAME[:SETTINGS]",
        help=f"workload: {', '.join([*LENGTHS, *SESSIONS])}, or the file of a trace; may be repeated; none: poisson. "
        "Its settings have the names of flags: 1k1k:range=4,24:requests=200:precision=0.1:slo-ttft=2000:slo-tpot=40",
    )
    work.add_argument(
        "--range",
        type=parse_range,
        metavar="LOW,HIGH",
        help="lowest and highest rate of the search, requests a second; none: the workload's",
    )
    work.add_argument(
        "--precision",
        type=float,
        default=0.05,
        help="largest relative difference between a rate that met the objectives and one that missed them",
    )
    work.add_argument("--share", type=float, default=0.99, help="share of the requests that must meet the objectives")
    work.add_argument("--requests", type=int, default=300, metavar="N", help="requests that are judged in each probe")
    work.add_argument(
        "--warm-up", type=int, default=30, metavar="N", help="requests before these, which are not judged"
    )
    work.add_argument(
        "--late",
        type=float,
        default=20,
        metavar="MS",
        help="p99 of the generator's lateness above which a probe is refused",
    )
    work.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="factor of the lengths of prompts and answers (not of a trace's)",
    )
    work.add_argument("--think", type=float, default=1.0, metavar="X", help="factor of the think times of sessions")
    work.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="seconds of a server's turn, its start included, beyond which no probe should last; none: no limit",
    )
    work.add_argument("--rounds", type=int, default=1, metavar="N", help="turns of each server")
    add_client_arguments(parser)
    output = add_output_arguments(parser)
    output.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.json",
        help="results of an earlier run to add to the table and the plot; may be repeated",
    )
    args = parser.parse_args()
    if not 0 < args.share <= 1:
        parser.error("--share must be above 0 and at most 1")
    if not args.server and not args.merge:
        parser.error("nothing to measure: no --server, and no --merge of what was measured before")
    if len({one.name for one in args.server}) < len(args.server):
        parser.error("each --server needs a name of its own")
    return args


def make_task(text: str, args: argparse.Namespace) -> Task:
    """Return the workload NAME[:SETTINGS]; the flags give the settings that are absent.

    ValueError for an unknown name or setting, OSError for a trace's file that cannot be read.
    """
    name, *settings = text.split(":")
    own = dict(setting.partition("=")[::2] for setting in settings)
    if unknown := own.keys() - WORKLOAD_SETTINGS.keys():
        raise ValueError(f"{name}: no setting {', '.join(unknown)}; there are {', '.join(WORKLOAD_SETTINGS)}")
    given = {key.replace("-", "_"): WORKLOAD_SETTINGS[key](value) for key, value in own.items()}
    chosen = argparse.Namespace(**{**vars(args), **given})
    if chosen.requests < 1 or chosen.warm_up < 0 or chosen.precision <= 0:
        raise ValueError(f"{name}: requests must be at least 1, warm-up at least 0, the precision above 0")
    workload = make_workload(name, chosen.requests + chosen.warm_up, scale=args.scale, think=args.think)
    rules = Judgement(slo_of(chosen), args.share, chosen.warm_up, args.late)
    return Task(workload, chosen.range or workload.rates, chosen.requests, chosen.precision, rules)


def make_tasks(args: argparse.Namespace) -> list[Task]:
    """Return the searches to run. SystemExit for a name that is neither a workload's nor a trace's file."""
    try:
        return [make_task(text, args) for text in args.workload or ["poisson"]]
    except (ValueError, OSError, argparse.ArgumentTypeError) as error:
        raise SystemExit(f"goodput: error: --workload: {error}") from None


def announce(task: Task) -> None:
    """Print the number of probes of a search, and warn if its probes are too short."""
    name, (low, high) = task.workload.name, task.rates
    if task.requests / high < SHORTEST_PROBE * task.rules.slo.ttft_ms / 1e3:
        short = f"{task.requests / high:.1f} s at {cell_text(high)}/s is too short for a queue to show"
        print(f"goodput: warning: {name}: a probe of {short}; more requests", file=sys.stderr)
    count = num_probes(low, high, task.precision)
    print(f"{name}: {count} probes of {task.requests} requests, {cell_text(low)} to {cell_text(high)} a second")


def read_searches(path: Path) -> list[Search]:
    """Return the results in a file that this script wrote. SystemExit if it is another file."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        return msgspec.json.decode(document["results"], type=list[Search])
    except (OSError, msgspec.MsgspecError, KeyError) as error:
        raise SystemExit(f"goodput: error: --merge {path.name}: {error}") from None


@contextmanager
def running(contestant: Contestant, args: argparse.Namespace) -> Iterator[Prober]:
    """Yield a server's prober. If the server is a command, it is started before and ended after."""
    api_key = os.environ.get("OPENAI_API_KEY")

    def prober(base_url: str) -> Prober:
        served = ask_served(base_url, model=args.model, context=args.context, vocab_size=args.vocab, api_key=api_key)
        target = Target(base_url, served.model, args.temperature, args.timeout, api_key)
        return Prober(target, served, seed=args.seed, processes=args.processes, idle_timeout=args.idle_timeout)

    if contestant.base_url is not None:
        yield prober(contestant.base_url)
        return
    with ServerProcess(contestant.command, timeout=args.start_timeout, api_key=api_key) as server:
        print(f"{contestant.name} is ready after {server.start_seconds:.1f} s", flush=True)
        yield prober(server.base_url)


def run_search(
    search: Search,
    prober: Prober,
    task: Task,
    *,
    probe_numbers: Iterator[int],
    deadline: float,
    keep: Callable[[], None],
) -> None:
    """Fill in the search, and call `keep` after each probe. `idle.NotIdle` if the server does not become idle again.

    No probe begins that is expected to last beyond `deadline`, in `time.monotonic` seconds.
    """
    count = task.requests + task.rules.warm_up

    def expected_seconds(rate: float) -> float:
        after_last = [done.seconds - count / done.rate for done in search.probes if not done.stopped]
        return count / rate + max(after_last, default=0.0)

    def probe(rate: float) -> Verdict | None:
        if time.monotonic() + expected_seconds(rate) > deadline:
            print(f"{search.server}, {search.workload}: the budget is spent", flush=True)
            return None
        outcome = prober.probe(task.workload, rate, task.rules, next(probe_numbers))
        search.probes.append(outcome)
        said = "".join(f"\n  error: {error}" for error in outcome.errors)
        print(f"{search.server}, {search.workload}: {describe(outcome)}{said}", flush=True)
        keep()
        return outcome.verdict

    bisect(probe, *task.rates, task.precision)


def describe(probe: Probe) -> str:
    """Return a probe in one line."""
    said = f"{cell_text(probe.rate)}/s {probe.verdict}: "
    if probe.summary is None:
        said += f"the load generator was late, p99 {probe.late_p99_ms:.0f} ms (more --processes may help)"
    else:
        said += f"{probe.summary.good_share:.1%} within the objectives"
    said += f", {'stopped' if probe.stopped else 'done'} after {probe.seconds:.0f} s"
    whole = probe.summary.end_to_end_ms if probe.summary and probe.verdict is Verdict.HELD else None
    if probe.summary and whole and probe.summary.requests / probe.rate < SETTLED * whole.p50 / 1e3:
        said += f"; answers take {whole.p50 / 1e3:.0f} s: the load had not settled, more requests"
    return said + (f" ({probe.cut} cut to the context)" if probe.cut else "")


def print_searches(searches: Sequence[Search]) -> None:
    """Print the found rates, and the figures of the probes that they come from."""
    rows: list[list[Cell]] = []
    names = [one.workload for one in searches]
    for one in sorted(searches, key=lambda one: names.index(one.workload)):
        row: list[Cell] = [one.workload, one.server, one.round, one.found, one.bracket.missed]
        if (best := one.best) is None or (figures := best.summary) is None:
            rows.append([*row, *[None] * 12, len(one.probes)])
            continue
        spreads = (figures.ttft_ms, figures.tpot_ms, figures.tbt_ms)
        percentiles = [value for each in spreads for value in ((each.p50, each.p99) if each else (None, None))]
        rows.append(
            [
                *row,
                best.pace,
                f"{figures.good_share:.1%}",
                *percentiles,
                figures.output_tokens_per_second,
                f"{figures.hit_rate:.1%}",
                f"{best.generator_cpu:.0%}",
                best.late_p99_ms,
                len(one.probes),
            ]
        )
    latencies = ["TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "gap p50 ms", "p99"]
    others = ["out tok/s", "hits", "generator CPU", "late p99 ms", "probes"]
    print(table(["workload", "server", "round", "req/s", "missed at", "pace", "good", *latencies, *others], rows))


def measure(
    contestant: Contestant,
    tasks: Sequence[Task],
    turn: Sequence[Search],
    args: argparse.Namespace,
    *,
    probe_numbers: Iterator[int],
    keep: Callable[[], None],
) -> None:
    """Fill in the searches of a server's turn, one a task. If it fails, stderr and the unfinished searches say why."""
    deadline = math.inf if args.budget is None else time.monotonic() + args.budget
    unfinished = list(turn)
    try:
        with running(contestant, args) as prober:
            for search, task in zip(turn, tasks, strict=True):
                run_search(search, prober, task, probe_numbers=probe_numbers, deadline=deadline, keep=keep)
                unfinished.pop(0)
    except (LaunchFailed, NotIdle, ValueError) as error:
        print(f"goodput: error: {contestant.name}: {error}", file=sys.stderr, flush=True)
        for search in unfinished:
            search.failure = str(error)


def main() -> None:
    args = parse()
    output = output_of(args)
    tasks = make_tasks(args) if args.server else []
    searches = [search for path in args.merge for search in read_searches(path)]
    probe_numbers = itertools.count()

    def keep() -> None:
        output.save("goodput", args, [asdict(one) | {"found": one.found} for one in searches])

    for task in tasks:
        announce(task)
    for round_number, contestant in itertools.product(range(1, args.rounds + 1), args.server):
        turn = [Search(contestant.name, task.workload.name, round_number, task.rules) for task in tasks]
        searches += turn
        measure(contestant, tasks, turn, args, probe_numbers=probe_numbers, keep=keep)
    print_searches(searches)
    keep()
    if output.plot:
        from measuring.plot import plot_searches

        plot_searches(output.plot, searches)
    if any(search.failure for search in searches):
        sys.exit(1)


if __name__ == "__main__":
    exit_on_sigterm()
    main()

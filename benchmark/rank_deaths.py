r"""Kill a random rank of a server under load, again and again; start and end servers; count what hangs.

    python benchmark/rank_deaths.py --shape 0.6b --kills 20 --starts 30
    python benchmark/rank_deaths.py --shape 0.6b --kills 3 --signal STOP -- --hang-timeout 3

A kill comes at a random moment while streams run, and each stream must end with an error event. The script prints the
seconds until the last stream has ended, and until the server and all its workers are gone. A start is followed by
SIGTERM as soon as the server is ready. `--parallel` servers share the devices, so their seconds are longer than those
of one alone; after `--seconds` no other begins. Flags of the server follow after `--`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar
from urllib.parse import urlsplit

from many_clients import stream
from measuring.report import Cell, table
from measuring.server_process import LaunchFailed, ServerProcess, exit_on_sigterm, is_running, worker_pids
from measuring.shapes import SHAPES, make_shape

T = TypeVar("T")

SCHEDULER = "minisgl.scheduler.process:run"
PATIENCE = 60.0  # seconds after which something hangs
TOKENS = 2000  # tokens of a stream: more than it gets


@dataclass(frozen=True, slots=True)
class Death:
    """End of a server after one of its ranks got a signal. Seconds count from the signal."""

    streams: float  # until the last stream's end
    gone: float  # until no process was left
    ends: Counter[str]  # ends of the streams

    @property
    def clean(self) -> bool:
        """True if every stream ended with an error event, and all processes ended in time."""
        return self.gone < PATIENCE and set(self.ends) == {"error"}


@dataclass(frozen=True, slots=True)
class Life:
    """Start and end of a server that gets no requests."""

    start: float  # seconds
    end: float
    code: int  # exit code

    @property
    def clean(self) -> bool:
        """True if it ended by itself, with exit code 0."""
        return self.code == 0


def kill_once(command: Sequence[str], signum: signal.Signals, clients: int, seed: int) -> Death:
    """Start a server, load it, and send the signal to one of its ranks."""
    with ServerProcess(command) as server:
        return asyncio.run(_kill(server, signum, clients, random.Random(seed)))


async def _kill(server: ServerProcess, signum: signal.Signals, clients: int, chance: random.Random) -> Death:
    url = urlsplit(server.base_url)
    host, port = url.hostname or "", url.port or 0
    workers = worker_pids(server.process.pid)
    begun = asyncio.Event()
    streams = [asyncio.create_task(stream(host, port, TOKENS, begun)) for _ in range(clients)]
    await asyncio.wait([asyncio.create_task(begun.wait()), *streams], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(chance.uniform(0.1, 1.0))
    victim = chance.choice(sorted(pid for entry, pid in workers.items() if entry.startswith(SCHEDULER)))
    begin = time.monotonic()
    os.kill(victim, signum)
    done, late = await asyncio.wait(streams, timeout=PATIENCE)
    ended = time.monotonic() - begin
    for one in late:
        one.cancel()
    while time.monotonic() < begin + PATIENCE and any(map(is_running, (server.process.pid, *workers.values()))):
        await asyncio.sleep(0.01)
    ends = Counter(one.result() for one in done) + Counter({"hung": len(late)})
    return Death(ended, time.monotonic() - begin, ends)


def live_once(command: Sequence[str], _: int) -> Life:
    """Start a server and end it."""
    with ServerProcess(command) as server:
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(PATIENCE)
        return Life(server.start_seconds, time.monotonic() - begin, code)


def repeat(work: Callable[[int], T], count: int, parallel: int, deadline: float) -> list[T]:
    """Return the calls' results, without those that had not begun by the deadline or whose server did not start."""

    def one(seed: int) -> T | None:
        try:
            return work(seed) if time.monotonic() < deadline else None
        except LaunchFailed as error:
            print(f"not clean: {error}")
            return None

    with ThreadPoolExecutor(parallel) as threads:
        return [result for result in threads.map(one, range(count)) if result is not None]


def spread(seconds: Iterable[float]) -> tuple[float, float]:
    """Return median and maximum."""
    values = list(seconds)
    return median(values), max(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", choices=SHAPES, help="shape of a model with random weights (default: the demo model)"
    )
    parser.add_argument(
        "--tp", type=int, default=2, metavar="N", help="tensor-parallel ranks of each server (default: 2)"
    )
    parser.add_argument(
        "--kills", type=int, default=20, metavar="N", help="servers of which a rank is killed (default: 20)"
    )
    parser.add_argument(
        "--starts", type=int, default=0, metavar="N", help="servers to start and end without work (default: 0)"
    )
    parser.add_argument(
        "--signal", default="KILL", choices=("KILL", "STOP"), help="signal that a rank gets (default: KILL)"
    )
    parser.add_argument(
        "--clients",
        type=int,
        default=8,
        metavar="N",
        help="streams of each server of which a rank is killed (default: 8)",
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="servers that run at a time (default: 1)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="seconds after which no other server starts (default: no limit)",
    )
    parser.add_argument("server", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    exit_on_sigterm()
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", "demo"]
        if args.shape is not None:
            model = ["--model", str(make_shape(args.shape, Path(folder))), "--dummy-weight"]
        command = [sys.executable, "-m", "minisgl", *model, "--tp", str(args.tp), "--port", "0", *args.server]
        kill = partial(kill_once, command, signal.Signals[f"SIG{args.signal}"], args.clients)
        deaths = repeat(kill, args.kills, args.parallel, deadline)
        lives = repeat(partial(live_once, command), args.starts, args.parallel, deadline)
    rows: list[list[Cell]] = []
    if deaths:
        rows.append([f"SIG{args.signal}, streams ended", len(deaths), *spread(one.streams for one in deaths)])
        rows.append([f"SIG{args.signal}, all gone", len(deaths), *spread(one.gone for one in deaths)])
    if lives:
        rows.append(["start", len(lives), *spread(one.start for one in lives)])
        rows.append(["end", len(lives), *spread(one.end for one in lives)])
    print(table(["seconds", "times", "median", "longest"], rows))
    ended: list[Death | Life] = [*deaths, *lives]
    for one in ended:
        if not one.clean:
            print(f"not clean: {one}")


if __name__ == "__main__":
    main()

"""Memory of a server's scheduler process over thousands of requests of varied lengths, as PSS at regular counts.

Bursts of requests are sent to the server started by the command after `--`, or to one of the demo model. Nothing here
depends on time, so other work may run on the machine.

    python benchmark/memory.py --requests 20000
    python benchmark/memory.py --requests 20000 -- python -m minisgl --port 0 --device cpu --max-running-requests 64
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from measuring.arguments import make_parser, parse_with_command
from measuring.client import Target
from measuring.load import run_load
from measuring.server_process import LaunchFailed, ServerProcess, ask_served, exit_on_sigterm, worker_pids
from measuring.workload import Lengths, TimedRequest, synthetic_load

DEMO = (sys.executable, "-m", "minisgl", "--port", "0", "--device", "cpu")


def pss_mb(pid: int) -> int:
    """Return the proportional set size of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("Pss:"))


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="requests to send")
    parser.add_argument("--every", type=int, default=1000, metavar="N", help="requests between two rows of the table")
    parser.add_argument("--burst", type=int, default=64, metavar="N", help="largest number of requests at once")
    parser.add_argument(
        "--input", type=int, default=80, metavar="TOKENS", help="mean length of the prompts, log-normal"
    )
    parser.add_argument(
        "--output", type=int, default=8, metavar="TOKENS", help="mean length of the answers, log-normal"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and tokens")
    args, command = parse_with_command(parser)
    return args, command or list(DEMO)


def main() -> None:
    args, command = parse()
    rng, lengths = random.Random(args.seed), Lengths(args.input, args.output, 0.9, 0.7)
    with ServerProcess(command) as server:
        served = ask_served(server.base_url)
        target = Target(server.base_url, served.model)
        pid = worker_pids(server.process.pid)["minisgl.scheduler.process:run"]
        print(f"0 requests: {pss_mb(pid)} MB", flush=True)
        done, limits = 0, {"vocab_size": served.vocab_size, "context": served.context}
        while done < args.requests:
            begin, load = done, list[TimedRequest]()
            while done < min(begin + args.every, args.requests):
                # Bursts of different sizes, so that steps have all numbers of rows.
                count = min(rng.randint(1, args.burst), args.requests - done)
                load += synthetic_load(args.seed + done, [0.2 * len(load) / args.burst] * count, lengths, **limits)[0]
                done += count
            records = run_load(target, load).records
            errors = [record.error for record in records if record.error]
            print(f"{done} requests: {pss_mb(pid)} MB, {len(errors)} errors", *sorted(set(errors))[:3], flush=True)


if __name__ == "__main__":
    exit_on_sigterm()
    try:
        main()
    except LaunchFailed as error:
        sys.exit(f"memory: error: {error}")

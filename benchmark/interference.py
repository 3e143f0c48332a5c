r"""Gaps between the tokens of running streams while long prompts arrive, under each batch policy.

Starts the server once for each policy, with the flags after `--`:

    python benchmark/interference.py --streams 4 --prompt 1500 -- --model demo --max-prefill-length 128
    python benchmark/interference.py --streams 32 --prompt 8000 --stream-tokens 4000 -- \
        --model FOLDER --load-format dummy --max-prefill-length 512
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from measuring.arguments import add_output_arguments, make_parser, output_of
from measuring.client import RequestRecord, Target
from measuring.load import run_load
from measuring.plot import plot_gaps
from measuring.report import Cell, table
from measuring.server_process import ServerProcess, ask_served, exit_on_sigterm
from measuring.statistics import FloatArray, spread
from measuring.workload import TimedRequest

POLICIES = ("prefill-first", "mixed")


@dataclass(frozen=True, slots=True)
class Interference:
    """Streams that start together, and then one long prompt after another, each answered with one token."""

    streams: int
    stream_tokens: int  # each gets
    prompts: int
    prompt_tokens: int
    every: float  # seconds between prompts
    quiet: float  # seconds before the first prompt
    vocab_size: int

    def load(self) -> list[TimedRequest]:
        rng = np.random.default_rng(0)

        def request(at: float, length: int, max_tokens: int) -> TimedRequest:
            return TimedRequest(at, rng.integers(0, self.vocab_size, length, dtype=np.int32), max_tokens)

        streams = [request(0.0, 16, self.stream_tokens) for _ in range(self.streams)]
        prompts = [request(self.quiet + number * self.every, self.prompt_tokens, 1) for number in range(self.prompts)]
        return streams + prompts


def token_gaps(work: Interference, records: Sequence[RequestRecord]) -> FloatArray:
    """Return ms between tokens of all streams while long prompts arrive.

    RuntimeError if a request failed, or if the streams ended before.
    """
    failed = [record.error for record in records if record.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    end = work.quiet + work.prompts * work.every
    gaps = []
    for record in records[: work.streams]:
        times = np.asarray(record.times)
        times = times[(times >= work.quiet) & (times <= end)]
        gaps.append(np.diff(times) * 1e3)
    found = np.concatenate(gaps)
    if not len(found):
        raise RuntimeError("the streams ended before a long prompt arrived: give more --stream-tokens")
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="streams that run throughout")
    parser.add_argument("--stream-tokens", type=int, default=500, metavar="TOKENS", help="tokens of each stream")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="number of long prompts")
    parser.add_argument("--prompt", type=int, default=8000, metavar="TOKENS", help="length of each long prompt")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="seconds between two long prompts")
    parser.add_argument(
        "--quiet", type=float, default=2.0, metavar="SECONDS", help="seconds before the first long prompt"
    )
    parser.add_argument("server", nargs="+", help="flags of the server, after --")
    add_output_arguments(parser)
    args = parser.parse_args()
    output = output_of(args)
    exit_on_sigterm()
    gaps = {}
    for policy in POLICIES:
        command = [sys.executable, "-m", "minisgl", "--port", "0", "--batch-policy", policy, *args.server]
        with ServerProcess(command) as server:
            served = ask_served(server.base_url)
            work = Interference(
                args.streams, args.stream_tokens, args.prompts, args.prompt, args.every, args.quiet, served.vocab_size
            )
            run = run_load(Target(server.base_url, served.model), work.load(), label=policy)
            gaps[policy] = token_gaps(work, run.records)
    spreads = {policy: spread(values) for policy, values in gaps.items()}
    rows: list[list[Cell]] = [
        [policy, one.p50, one.p90, one.p99, one.count] for policy, one in spreads.items() if one is not None
    ]
    print(table(["policy", "gap p50 ms", "p90 ms", "p99 ms", "tokens"], rows))
    output.save("interference", args, {policy: asdict(one) for policy, one in spreads.items() if one is not None})
    if output.plot:
        plot_gaps(output.plot, gaps)


if __name__ == "__main__":
    main()

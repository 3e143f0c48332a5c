r"""Gaps between the tokens of running streams while long prompts arrive, under each batch policy.

Starts the server once for each policy, with the flags after `--`:

    python benchmark/interference.py --streams 4 --prompt 1500 -- --model demo --max-prefill-length 128
    python benchmark/interference.py --streams 32 --prompt 8000 --stream-tokens 4000 -- \
        --model FOLDER --load-format dummy --max-prefill-length 512
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from minisgl.benchmark.arguments import add_output_arguments, make_parser, output_of
from minisgl.benchmark.client import Target
from minisgl.benchmark.interference import Interference, token_gaps
from minisgl.benchmark.launch import ServerProcess, ask_served, exit_on_sigterm
from minisgl.benchmark.load import run_load
from minisgl.benchmark.plot import plot_gaps
from minisgl.benchmark.report import table
from minisgl.benchmark.statistics import spread

POLICIES = ("prefill-first", "mixed")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="streams that run all the time")
    parser.add_argument("--stream-tokens", type=int, default=500, metavar="TOKENS", help="of each stream")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="long prompts")
    parser.add_argument("--prompt", type=int, default=8000, metavar="TOKENS", help="of each long prompt")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between long prompts")
    parser.add_argument("--quiet", type=float, default=2.0, metavar="SECONDS", help="before the first long prompt")
    parser.add_argument("server", nargs="+", help="flags of the server, after --")
    add_output_arguments(parser)
    args = parser.parse_args()
    exit_on_sigterm()
    gaps = {}
    for policy in POLICIES:
        command = [sys.executable, "-m", "minisgl", "--port", "0", "--batch-policy", policy, *args.server]
        with ServerProcess(command) as server:
            served = ask_served(server.base_url, model=None, context=None, vocab_size=None)
            work = Interference(
                args.streams, args.stream_tokens, args.prompts, args.prompt, args.every, args.quiet, served.vocab_size
            )
            gaps[policy] = token_gaps(work, run_load(Target(server.base_url, served.model), work.load(), label=policy))
    spreads = {policy: spread(values) for policy, values in gaps.items()}
    rows = [[policy, one.p50, one.p90, one.p99, one.count] for policy, one in spreads.items() if one is not None]
    print(table(["policy", "gap p50 ms", "p90 ms", "p99 ms", "tokens"], rows))
    output = output_of(args)
    output.save("interference", args, {policy: asdict(one) for policy, one in spreads.items() if one is not None})
    if output.plot:
        plot_gaps(output.plot, gaps)


if __name__ == "__main__":
    main()

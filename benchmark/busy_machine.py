"""Seconds of one answer on the CPU, without and with busy loops on the same machine; CPU seconds of the process, too.

python benchmark/busy_machine.py                # 12 busy loops
GOMP_SPINCOUNT=10000 python benchmark/busy_machine.py --loops 2
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from measuring.arguments import make_parser
from measuring.report import Cell, table
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep this many processes computing within the block."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="folder or hub id of the model; demo: the built-in one")
    parser.add_argument("--loops", type=int, default=12, metavar="N", help="processes that keep a core busy")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="answers for each row of the table")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    rows: list[list[Cell]] = []
    with LLM(args.model, device="cpu") as llm:
        for loops in (0, args.loops):
            llm.generate([[5] * 64], params, use_tqdm=False)
            with busy_loops(loops):
                for _ in range(args.repeats):
                    begin, cpu = time.perf_counter(), time.process_time()
                    llm.generate([[5] * 64], params, use_tqdm=False)
                    rows.append([loops, time.perf_counter() - begin, time.process_time() - cpu])
    print(table(["busy loops", "seconds", "CPU seconds"], rows))


if __name__ == "__main__":
    main()

r"""Latencies of batch policies, simulated: the real scheduler and step loop, and a device that is a formula.

The formula is a roofline of Llama-3.1-8B on an H200: weights that are read once and multiplied with every token,
attention, and K and V read by decodes. The scheduler's cost model is measured on it as an engine measures its
own. Nothing depends on the machine, so runs show the effect of a policy and of a change to it. Workloads:
bursts of code completions, a Poisson process of conversations, these all at once, InferenceX's shapes (1k1k, 1k8k,
8k1k), or a trace's file; with `--concurrency`, a shape as a closed loop.

    python benchmark/simulate.py
    python benchmark/simulate.py --policies mixed:35,mixed:50 --workloads poisson --rate 10
    python benchmark/simulate.py --workloads AzureLLMInferenceTrace_conv.csv --rate 23 --requests 440 --warm-up 40 \
        --policies mixed:35:8192:fcfs,mixed:35,mixed:49 --max-running-requests 384
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measuring.arguments import make_parser
from measuring.client import RequestRecord
from measuring.load_arguments import add_slo_arguments, slo_of
from measuring.online_workloads import LENGTHS
from measuring.report import Cell, table, write_json
from measuring.statistics import Slo, summarize, summarize_closed_loop
from measuring.traces import read_trace
from measuring.workload import fit_context, poisson_arrivals
from minisgl.config import SchedulerConfig
from minisgl.core import AnyArray, Batch, Int32Array, PendingStep, StepResult
from minisgl.engine.cost_measurement import measure_cost
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.cache_pools import make_pools
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.scheduler import Scheduler
from minisgl.step_cost import StepCost

PAGE_SIZE, NUM_PAGES, MAX_SEQ_LEN = 64, 13_000, 32_768
POLICIES = "prefill-first,mixed:0:512,mixed:0:2048,mixed:0,mixed:20,mixed:35,mixed:50"
WORKLOADS = ("bursts", "poisson", "at-once")
HOST_SECONDS = 3e-4  # host's seconds for each step, beside the device's


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a step of Llama-3.1-8B on an H200, fitted to measured steps and to a server under Azure's trace.

    In a step of decodes alone a row takes less time than its operations would in a step with chunks, because memory
    bandwidth bounds the step and the GPU's clock rises (docs/log.md, 2026-11-24).
    """

    launch: float = 0.6e-3
    weights: float = 3.65e-3
    token: float = 23.4e-6
    context: float = 1.0e-9  # a token of a chunk, a token that it attends to
    decode_context: float = 33.6e-9  # 128 KiB of K and V
    alone_row: float = 4.5e-6  # a decode in a step without chunks
    mixed: float = 0.3e-3  # more for the attention of decodes and chunks in one step
    mixed_context: float = 4e-9  # there more for each token that decodes attend to

    def seconds(self, batch: Batch) -> float:
        starts, tokens = batch.start_pos.astype(np.float64), batch.query_lens.astype(np.float64)
        is_decode = batch.query_lens == 1
        read = float(starts[is_decode].sum())
        if is_decode.all():
            return self.launch + self.weights + self.alone_row * len(tokens) + self.decode_context * read
        products = math.hypot(self.weights, self.token * batch.num_tokens)
        attended = float((tokens * (starts + tokens / 2))[~is_decode].sum())
        seconds = self.launch + products + self.context * attended + self.decode_context * read
        return seconds + (self.mixed + self.mixed_context * read if is_decode.any() else 0.0)


class Clock:
    """Simulated time in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Device:
    """Executes steps one after the other."""

    bitmask: Int32Array = np.zeros((0, 1), dtype=np.int32)

    def __init__(self, clock: Clock, roofline: Roofline) -> None:
        self._clock = clock
        self._roofline = roofline
        self._free_at = 0.0

    def forward(self, batch: Batch) -> None:
        self._clock.now += HOST_SECONDS
        self._free_at = max(self._free_at, self._clock.now) + self._roofline.seconds(batch)

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> PendingStep:  # noqa: ARG002
        done = self._free_at

        def wait() -> StepResult[AnyArray]:
            self._clock.now = max(self._clock.now, done)
            return StepResult(np.full(int(batch.needs_sample.sum()), 5, dtype=np.int32))

        return wait


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds
    prompt: int  # tokens
    output: int


def measured_cost(roofline: Roofline, max_prefill_tokens: int, num_slots: int) -> StepCost:
    """Return the cost model that an engine with this device would measure."""
    cost = measure_cost(
        lambda batches: [roofline.seconds(batch) for batch in batches],
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_slots=num_slots,
        vocab_size=2,
        max_seq_len=MAX_SEQ_LEN,
        max_prefill_tokens=max_prefill_tokens,
    )
    assert cost is not None
    return cost


def simulate(
    config: SchedulerConfig,
    arrivals: Sequence[Arrival],
    roofline: Roofline,
    num_slots: int,
    concurrency: int | None,
) -> list[RequestRecord]:
    """Serve all arrivals, up to `num_slots` at a time.

    With `concurrency`, a closed loop, this many run at a time, and each later one arrives when another has ended.
    """
    clock = Clock()
    scheduler = Scheduler(
        config,
        make_pools(config.cache, PAGE_SIZE, NUM_PAGES),
        num_slots=num_slots,
        max_seq_len=MAX_SEQ_LEN,
        eos_token_ids=(),
        cost=measured_cost(roofline, config.max_prefill_tokens, num_slots),
    )
    loop = StepLoop(scheduler, Device(clock, roofline), overlap=config.overlap, clock=clock)
    rng = np.random.default_rng(0)
    records: list[RequestRecord] = []
    ended = 0
    while len(records) < len(arrivals) or loop.has_work:
        if not loop.has_work:
            clock.now = max(clock.now, arrivals[len(records)].at)
        while len(records) < len(arrivals) and arrivals[len(records)].at <= clock.now:
            if concurrency is not None and len(records) - ended == concurrency:
                break
            one = arrivals[len(records)]
            prompt = rng.integers(0, 100_000, one.prompt, dtype=np.int32)
            scheduler.add(len(records), prompt, SamplingParams(max_tokens=one.output, ignore_eos=True), seed=0)
            due = one.at if concurrency is None else clock.now
            records.append(RequestRecord(len(records), due, one.prompt, one.output))
        for seq_id in loop.step().seq_ids:
            records[seq_id].times.append(clock.now)
            records[seq_id].completion_tokens += 1
            ended += records[seq_id].completion_tokens == records[seq_id].max_tokens
    scheduler.check_idle()
    return records


def lengths(rng: np.random.Generator, mean: float, sigma: float, count: int, most: int) -> list[int]:
    """Return log-normal lengths of this mean."""
    values = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [int(value) for value in np.clip(values, 2, most)]


def make_closed_loop(name: str, concurrency: int, count: int) -> list[Arrival]:
    """Return requests of a shape, the first of which begin in the middle of their answers."""
    seeded = random.Random(0)
    arrivals = [Arrival(0.0, *LENGTHS[name].draw(seeded)) for _ in range(count)]
    for index, one in enumerate(arrivals[:concurrency]):
        answered = seeded.randrange(one.output)
        arrivals[index] = Arrival(0.0, one.prompt + answered, one.output - answered)
    return arrivals


def make_workload(name: str, rate: float, count: int) -> list[Arrival]:
    """Return code completions in bursts, conversations of a Poisson process or all at once, a shape, or a trace."""
    if name not in WORKLOADS:
        if shape := LENGTHS.get(name):
            seeded = random.Random(0)
            return [Arrival(at, *shape.draw(seeded)) for at in poisson_arrivals(seeded, rate, count)]
        trace = read_trace(Path(name), count)
        pace = rate * trace[-1].at / len(trace)
        return [Arrival(row.at / pace, *fit_context(row.input_tokens, row.output_tokens, MAX_SEQ_LEN)) for row in trace]
    rng = np.random.default_rng(1)
    if name == "bursts":
        prompts, outputs = lengths(rng, 2136, 1.0, count, 16_000), lengths(rng, 25, 0.8, count, 400)
        at = np.arange(count) // 50 * 4.0 + rng.uniform(0, 1.0, count)  # 50 requests in a second of four
    else:
        prompts, outputs = lengths(rng, 1740, 1.0, count, 16_000), lengths(rng, 343, 0.8, count, 4000)
        at = np.cumsum(rng.exponential(1 / rate, count)) * (name == "poisson")
    return [Arrival(*one) for one in zip(sorted(at.tolist()), prompts, outputs, strict=True)]


def make_config(text: str) -> SchedulerConfig:
    """Return the configuration of POLICY[:TARGET_TBT[:MAX_PREFILL_LENGTH[:SCHEDULE_POLICY]]]."""
    given = text.split(":")
    policy, target, tokens, order = [*given, *("35", "8192", "sjf")[len(given) - 1 :]]
    config = SchedulerConfig(
        batch_policy=policy,  # type: ignore[arg-type]
        target_tbt=float(target),
        max_prefill_tokens=int(tokens),
        schedule_policy=order,  # type: ignore[arg-type]
    )
    config.validate()
    return config


def figures(records: Sequence[RequestRecord], slo: Slo, concurrency: int | None) -> dict[str, float]:
    """Return percentiles in ms, output tokens a second, and the share within the objectives.

    `concurrency`: that of a closed loop, whose first requests are not judged.
    """
    if concurrency is None:
        found = summarize(records, slo, since=records[0].due)
    else:
        found = summarize_closed_loop(records, slo, concurrency)
    assert found.ttft_ms
    assert found.tbt_ms
    assert found.tpot_ms
    assert found.end_to_end_ms
    return {
        "ttft_p50_ms": found.ttft_ms.p50,
        "ttft_p99_ms": found.ttft_ms.p99,
        "tbt_p50_ms": found.tbt_ms.p50,
        "tbt_p90_ms": found.tbt_ms.p90,
        "tbt_p99_ms": found.tbt_ms.p99,
        "tpot_p99_ms": found.tpot_ms.p99,
        "e2e_p50_s": found.end_to_end_ms.p50 / 1e3,
        "e2e_p99_s": found.end_to_end_ms.p99 / 1e3,
        "output_tok_s": found.output_tokens_per_second,
        "good": found.good_share,
    }


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--policies",
        default=POLICIES,
        metavar="POLICY[:MS[:TOKENS[:ORDER]]],...",
        help="batch policies, each with --target-tbt, --max-prefill-length and --schedule-policy",
    )
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        metavar="NAME,...",
        help="workloads: those of the default, 1k1k, 1k8k, 8k1k, or the file of a trace",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=7.0,
        metavar="N",
        help="requests a second (not of the workloads that arrive in bursts or at once)",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="number of places of a closed loop instead; every workload must be one of the shapes",
    )
    parser.add_argument("--requests", type=int, default=600, metavar="N", help="requests of each workload")
    parser.add_argument("--warm-up", type=int, default=0, metavar="N", help="first requests that are not judged")
    parser.add_argument(
        "--max-running-requests", type=int, default=256, metavar="N", help="requests that run at the same time"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    add_slo_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for workload in args.workloads.split(","):
        if args.concurrency is None:
            arrivals = make_workload(workload, args.rate, args.requests)
        else:
            arrivals = make_closed_loop(workload, args.concurrency, args.requests)
        results[workload] = {}
        for policy in args.policies.split(","):
            records = simulate(make_config(policy), arrivals, Roofline(), args.max_running_requests, args.concurrency)
            results[workload][policy] = figures(records[args.warm_up :], slo_of(args), args.concurrency)
        rows: list[list[Cell]] = [[policy, *found.values()] for policy, found in results[workload].items()]
        print(table([workload, *(name.replace("_", " ") for name in next(iter(results[workload].values())))], rows))
        print(flush=True)
    if args.json:
        write_json(args.json, "simulate", vars(args), results)


if __name__ == "__main__":
    main()

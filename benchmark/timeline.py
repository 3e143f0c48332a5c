"""The parts of decode steps and prefills on host and device, from torch's profiler: a table, and a plot of a few steps.

The host's part is divided into schedule (decide the plan), launch (send it to the device), wait (for the tokens of the
step before) and complete (finish that one). The device's part is divided by kernel and by kind of work; a gap is time
in which none runs. A kernel that begins while the one before it still runs counts from that one's end. With several
ranks the times are those of rank 0, and its all-reduces include the wait for the other ranks.

    python benchmark/timeline.py --shape 0.6b --batch-sizes 1,64,256 --plot docs/timeline.png
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from measuring.arguments import (
    add_engine_arguments,
    add_output_arguments,
    check_gpus,
    engine_options,
    integers,
    make_parser,
    model_folder_of,
    output_of,
)
from measuring.engines import MinisglEngine
from measuring.report import table
from measuring.shapes import read_vocab_size
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import StepLoop

HOST = ("schedule", "launch", "wait", "complete")
TIMED_STEPS, STEPS = 50, 12  # by the clock, and under the profiler
KERNELS = 8  # rows of a table
IDS = 10_000  # token ids that prompts are drawn from, or all of a smaller vocabulary
KINDS = {  # beginnings of kernels' names
    "product": ("skinny_", "small_batch_gemm", "quantized_", "fp8_gemm", "library", "moe_"),
    "rounding": ("quantize",),  # rounding of activations
    "attention": ("decode_attention", "norm_rope_store", "latent_", "delta_", "device_kernel"),  # the last: FA3
    "sum over ranks": ("one_shot", "two_shot", "received", "long_sum", "gather", "nccl"),
    "norm": ("rms_norm", "norm_add"),
    "sampling": ("sample_", "process_logits"),
}


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    begin: float  # microseconds
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Some steps of one kind."""

    title: str  # rows of decodes, or tokens of prompts
    step_us: float  # by the clock, without the profiler
    host_us: dict[str, float]  # per step, without the profiler
    device: list[Span]
    host: list[Span]
    steps: int

    @property
    def busy_us(self) -> float:
        """Time of a step in which some kernel runs."""
        total, reached = 0.0, 0.0
        for span in self.device:
            total += max(0.0, span.end - max(span.begin, reached))
            reached = max(reached, span.end)
        return total / self.steps

    @property
    def profiled_us(self) -> float:
        """Time of a step under the profiler."""
        return (max(span.end for span in self.device) - self.device[0].begin) / self.steps


@contextmanager
def spans_around_parts(loop: StepLoop, span: Callable[[str], Any]) -> Iterator[None]:
    """Put `span(name)` around each part of the host's work within the block."""

    def wrapped(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with span(name):
                return inner(*args)

        return call

    with (
        patch.object(loop.scheduler, "schedule", wrapped(loop.scheduler.schedule, "schedule")),
        patch.object(loop, "_launch", wrapped(loop._launch, "launch")),
        patch.object(loop.scheduler, "complete", wrapped(loop.scheduler.complete, "complete")),
    ):
        yield


class Clock:
    """Adds up the seconds spent in spans."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, name: str) -> Clock:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] += time.perf_counter() - self._begin


def start_decode(loop: StepLoop, rows: int, prompt_tokens: int, first_seq_id: int, num_ids: int = IDS) -> None:
    """Run this many requests until all of them decode. ValueError if they cannot run at once."""
    rng = np.random.default_rng(rows)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1000)
    for row in range(rows):
        prompt = rng.integers(0, num_ids, prompt_tokens).astype(np.int32)
        loop.scheduler.add(first_seq_id + row, prompt, params, seed=row)
    decoding: set[int] = set()
    while len(decoding) < rows:
        decoding.update(loop.step().seq_ids)
        counts = loop.scheduler.counts()
        if counts["requests_waiting"] and counts["requests_running"] <= len(decoding):
            break  # nobody can enter beside them
    running = max(len(loop.step().seq_ids) for _ in range(20))
    if running < rows:
        raise ValueError(f"{running} of {rows} requests run at once: more need a larger --max-running, or more pages")


def measure_decode(loop: StepLoop, rows: int, prompt_tokens: int, first_seq_id: int, num_ids: int) -> Timeline:
    """Measure decodes of this many rows."""

    def run(steps: int) -> int:
        for _ in range(steps):
            loop.step()
        return steps

    start_decode(loop, rows, prompt_tokens, first_seq_id, num_ids)
    timeline = observe(loop, f"{rows} rows", run)
    for seq_id in range(first_seq_id, first_seq_id + rows):
        loop.scheduler.end(seq_id, "abort")
    while loop.has_work:
        loop.step()
    return timeline


def measure_prefill(loop: StepLoop, tokens: int, prompt_tokens: int, first_seq_id: int, num_ids: int) -> Timeline:
    """Measure the steps of new prompts that have this many tokens together."""
    rng, seq_ids = np.random.default_rng(tokens), itertools.count(first_seq_id)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1)

    def run(_steps: int) -> int:
        before = loop.counts.begun
        for at in range(0, tokens, prompt_tokens):
            prompt = rng.integers(0, num_ids, min(prompt_tokens, tokens - at)).astype(np.int32)
            loop.scheduler.add(next(seq_ids), prompt, params, seed=at)
        while loop.has_work:
            loop.step()
        return loop.counts.begun - before

    run(1)  # work that happens once
    return observe(loop, f"{tokens} prompt tokens", run)


def observe(loop: StepLoop, title: str, run: Callable[[int], int]) -> Timeline:
    """Measure `run`, which makes about so many steps and returns their number: by the clock, then by the profiler."""
    clock = Clock()
    with spans_around_parts(loop, clock):
        begin = time.perf_counter()
        steps = run(TIMED_STEPS)
        step_us = (time.perf_counter() - begin) / steps * 1e6
    host_us = {name: seconds / steps * 1e6 for name, seconds in clock.seconds.items()}
    host_us["wait"] = step_us - sum(host_us.values())

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with spans_around_parts(loop, record_function), profile(activities=activities) as profiled:
        steps = run(STEPS)
        torch.cuda.synchronize()
    device, host = [], []
    for event in profiled.events() or []:
        span = Span(event.name, event.time_range.start, event.time_range.end)
        if event.name in HOST:
            if event.device_type == DeviceType.CPU:
                host.append(span)
        elif event.device_type == DeviceType.CUDA:
            device.append(span)
    device.sort(key=lambda span: span.begin)
    host.sort(key=lambda span: span.begin)
    return Timeline(title, step_us, host_us, device, host, steps)


def short(kernel: str) -> str:
    """Return a kernel's name without its types; the many names of cuBLAS's and CUTLASS's products are one."""
    if kernel.startswith(("nvjet", "void cublas", "void splitKreduce")) or "GemmUniversal" in kernel:
        return "library's product"
    name = re.sub(r"^void ", "", kernel).split("(")[0]
    return re.sub(r"<.*", "", name).rpartition("::")[2] or kernel[:40]


def kind_of(kernel: str) -> str:
    """Return the kind of work that a kernel does."""
    name = short(kernel)
    return next((kind for kind, beginnings in KINDS.items() if name.startswith(beginnings)), "other")


def kernel_rows(timeline: Timeline, name_of: Callable[[str], str] = short) -> list[list[Any]]:
    """Return rows [kernel, launches a step, microseconds a step, share], the longest first."""
    time_of: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    reached = 0.0
    for span in timeline.device:
        time_of[name_of(span.name)] += max(0.0, span.end - max(span.begin, reached))
        count[name_of(span.name)] += 1
        reached = max(reached, span.end)
    total, steps = sum(time_of.values()), timeline.steps
    longest = sorted(time_of, key=lambda name: -time_of[name])[:KERNELS]
    return [[n, count[n] / steps, time_of[n] / steps, f"{time_of[n] / total:.0%}"] for n in longest]


def main() -> None:
    parser = make_parser(__doc__)
    add_engine_arguments(parser)
    work = parser.add_argument_group("work")
    work.add_argument("--batch-sizes", type=integers, default=(1, 64, 256), metavar="SIZES", help="rows of the decodes")
    work.add_argument(
        "--prefill",
        type=integers,
        default=(),
        metavar="TOKENS",
        help="numbers of prompt tokens of prefills to measure too",
    )
    work.add_argument(
        "--prompt", type=int, default=640, metavar="TOKENS", help="length of a prompt, which decodes find in the cache"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    output = output_of(args)
    check_gpus()
    timelines = []
    with model_folder_of(args) as folder:
        engine = MinisglEngine(engine_options(args, folder, args.prompt + 1100, rows=max(args.batch_sizes)))
        num_ids = min(read_vocab_size(folder), IDS)
        first_ids = itertools.count(10_000, 10_000)
        for rows, first in zip(args.batch_sizes, first_ids, strict=False):
            timelines.append(measure_decode(engine.loop, rows, args.prompt, first, num_ids))
        for tokens, first in zip(args.prefill, first_ids, strict=False):
            timelines.append(measure_prefill(engine.loop, tokens, args.prompt, first, num_ids))
        engine.close()
    figures: list[list[Any]] = []
    for timeline in timelines:
        host = [timeline.host_us[name] for name in HOST]
        figures.append([timeline.title, timeline.step_us, timeline.busy_us, *host])
    head = ["", "step us", "device busy us", *(f"host {name} us" for name in HOST)]
    print(table(head, figures), end="\n\n")
    for timeline in timelines:
        print(f"{timeline.title}, a step under the profiler: {timeline.profiled_us:.0f} us")
        print(table(["kind", "launches", "us", "share"], kernel_rows(timeline, kind_of)), end="\n\n")
        print(table(["kernel", "launches", "us", "share"], kernel_rows(timeline)), end="\n\n")
    output.save("timeline", args, {t.title: {"step_us": t.step_us, **t.host_us} for t in timelines})
    if output.plot:
        from measuring.plot import plot_timelines

        plot_timelines(output.plot, [(t.title, t.host, [(short(s.name), s) for s in t.device]) for t in timelines])


if __name__ == "__main__":
    main()

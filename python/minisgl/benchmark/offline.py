"""Measurements of an engine in this process: the headline's tokens per second, decode steps, prefill."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from minisgl.benchmark.engines import OfflineEngine
from minisgl.benchmark.workload import FRESH_IDS, OFFLINE_IDS, OfflineBatch, offline_batch, random_prompts

TEMPERATURE = 0.6  # of the headline


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    """The headline, run by run."""

    output_tokens: int
    tokens_per_second: list[float]
    tuned: str | None  # how the engine was tuned to the work


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Of one batch size: medians over repeats."""

    first_ms: float  # to the first token of all
    step_ms: float  # for each token after it


@dataclass(slots=True)
class LatencyFigures:
    decode: dict[int, DecodeFigures] = field(default_factory=dict)  # by batch size
    prefill_tokens_per_second: dict[int, float] = field(default_factory=dict)  # by length of a lone prompt


@dataclass(frozen=True, slots=True)
class LatencySizes:
    """What `measure_latency` measures."""

    batch_sizes: tuple[int, ...] = (1, 8, 64)
    prompt_tokens: int = 512  # of decode
    new_tokens: int = 256  # of decode
    prefill: tuple[int, ...] = (512, 2048, 8192)
    repeats: int = 3


def timed(engine: OfflineEngine, work: OfflineBatch, temperature: float, *, progress: bool = False) -> float:
    """Seconds to answer all of it in full."""
    begin = time.perf_counter()
    made = engine.generate(work, temperature, progress=progress)
    seconds = time.perf_counter() - begin
    if made != work.output_tokens:
        raise RuntimeError(f"{made} tokens came, {work.output_tokens} were asked for")
    return seconds


def warm_up(engine: OfflineEngine, rng: random.Random, vocab_size: int, *, rows: int = 64, tokens: int = 300) -> None:
    """Let everything happen that happens once."""
    for count, length, new in ((min(8, rows), min(64, tokens), 16), (rows, tokens, 8)):
        prompts = random_prompts(rng, count, length, vocab_size)
        engine.generate(OfflineBatch(prompts, [new] * count), TEMPERATURE, progress=False)


def measure_offline(
    engine: OfflineEngine, runs: int, *, requests: int = 256, longest: int = 1024, vocab_size: int = OFFLINE_IDS
) -> OfflineFigures:
    """Output tokens per second of each run; detokenizing counts where the engine does it."""

    def work(run: int) -> OfflineBatch:
        return offline_batch(run, requests=requests, longest=longest, vocab_size=vocab_size)

    tuned = engine.prepare(work(runs), whole=False)
    rates = []
    for run in range(runs):
        batch = work(run)
        rates.append(batch.output_tokens / timed(engine, batch, TEMPERATURE, progress=True))
    return OfflineFigures(work(0).output_tokens, rates, tuned)


def measure_latency(
    engine: OfflineEngine, rng: random.Random, sizes: LatencySizes, *, vocab_size: int = FRESH_IDS[1]
) -> LatencyFigures:
    """Decode steps by batch size, and lone prompts by length."""
    figures = LatencyFigures()
    with tqdm(total=len(sizes.batch_sizes) + len(sizes.prefill), desc="Latency", unit="size") as bar:
        for batch_size in sizes.batch_sizes:
            figures.decode[batch_size] = _measure_decode(engine, rng, batch_size, sizes, vocab_size)
            bar.update()
        for length in sizes.prefill:
            seconds = [
                timed(engine, OfflineBatch(random_prompts(rng, 1, length, vocab_size), [1]), 0.0)
                for _ in range(sizes.repeats)
            ]
            figures.prefill_tokens_per_second[length] = length / statistics.median(seconds)
            bar.update()
    return figures


def _measure_decode(
    engine: OfflineEngine, rng: random.Random, batch_size: int, sizes: LatencySizes, vocab_size: int
) -> DecodeFigures:
    """A step is (time of n + 1 new tokens - time of 1 new token) / n, for fresh prompts, greedy."""

    def works() -> Iterator[OfflineBatch]:
        for new in (1, sizes.new_tokens + 1):
            prompts = random_prompts(rng, batch_size, sizes.prompt_tokens, vocab_size)
            yield OfflineBatch(prompts, [new] * batch_size)

    engine.prepare(next(works()), whole=True)
    firsts, steps = [], []
    for _ in range(sizes.repeats):
        first, whole = (timed(engine, work, temperature=0.0) for work in works())
        firsts.append(first * 1e3)
        steps.append((whole - first) / sizes.new_tokens * 1e3)
    return DecodeFigures(statistics.median(firsts), statistics.median(steps))

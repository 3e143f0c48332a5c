"""The workloads that engines are compared on: made from seeds, the same in every process."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from minisgl.core import Int32Array

OFFLINE_IDS = 10001  # the headline's ids are 0 .. 10000
FRESH_IDS = (300, 100001)  # ids of prompts for latencies


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """Prompts of token ids and how many tokens each shall get."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return max(len(prompt) + max_tokens for prompt, max_tokens in zip(self.prompts, self.max_tokens, strict=True))


def offline_batch(
    run: int = 0, *, requests: int = 256, longest: int = 1024, vocab_size: int = OFFLINE_IDS
) -> OfflineBatch:
    """Return the headline: prompts of 100..1024 random ids up to 10000, outputs of 100..1024 tokens, random.seed(0).

    Later runs keep every length and shift the ids, so that no prefix cache answers a prompt of an earlier run. In a
    smaller vocabulary ids are taken modulo its size; `longest` below 100 takes the place of the 100, too.
    """
    rng = random.Random(0)
    shortest = min(100, longest)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(shortest, longest))] for _ in range(requests)]
    max_tokens = [rng.randint(shortest, longest) for _ in range(requests)]
    if run:
        prompts = [[(token + 7919 * run) % OFFLINE_IDS for token in prompt] for prompt in prompts]
    if vocab_size < OFFLINE_IDS:
        prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    return OfflineBatch(prompts, max_tokens)


def random_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts that share no prefix worth caching."""
    low, high = FRESH_IDS if vocab_size > FRESH_IDS[0] else (0, vocab_size)
    return [[rng.randint(low, min(high, vocab_size) - 1) for _ in range(length)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request of a load: sent at its time, whatever became of others, unless it is a later turn of a session."""

    at: float  # seconds after the start; of a later turn, after the end of the answer that it follows
    prompt: Int32Array
    max_tokens: int
    follows: int | None = None  # index in the load of the turn before it


class LengthSource(Protocol):
    """Distribution of lengths in tokens."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return an input and an output."""
        ...

    def scaled(self, factor: float) -> LengthSource:
        """Return the distribution with its lengths multiplied."""
        ...


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Lengths in tokens between `least` times the longest and the longest, all equally likely."""

    longest_input: int
    longest_output: int
    least: float = 0.8

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._draw(rng, self.longest_input), self._draw(rng, self.longest_output)

    def scaled(self, factor: float) -> UniformLengths:
        longest = max(1, round(self.longest_input * factor)), max(1, round(self.longest_output * factor))
        return UniformLengths(*longest, self.least)

    def _draw(self, rng: random.Random, longest: int) -> int:
        return rng.randint(max(1, math.ceil(self.least * longest)), longest)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths in tokens: means before they are clipped, and the spread of their logarithms (0: fixed)."""

    mean_input: int = 1750
    mean_output: int = 350
    input_spread: float = 0.7
    output_spread: float = 0.6

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return an input within a factor of five of its mean, and an output within a factor of four."""
        return (
            _log_normal(rng, self.mean_input, self.input_spread, factor=5.0),
            _log_normal(rng, self.mean_output, self.output_spread, factor=4.0),
        )

    def scaled(self, factor: float) -> Lengths:
        means = max(1, round(self.mean_input * factor)), max(1, round(self.mean_output * factor))
        return Lengths(*means, self.input_spread, self.output_spread)


def _log_normal(rng: random.Random, mean: int, sigma: float, factor: float) -> int:
    value = rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return max(1, round(min(mean * factor, max(mean / factor, value))))


def poisson_arrivals(rng: random.Random, rate: float, count: int) -> list[float]:
    """Return times in seconds of `count` arrivals, `rate` a second on average; the first comes at once."""
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


def synthetic_load(
    seed: int,
    arrivals: Sequence[float],
    lengths: LengthSource,
    *,
    vocab_size: int,
    context: int,
    token_seed: int | None = None,
) -> tuple[list[TimedRequest], int]:
    """Return a request of fresh random tokens for each arrival, and how many had to be cut to the context.

    Lengths follow from `seed`, tokens from `token_seed` if it is given.
    """
    rng = random.Random(seed)
    tokens = np.random.default_rng(seed if token_seed is None else token_seed)
    load, num_cut = [], 0
    for at in arrivals:
        wanted = lengths.draw(rng)
        num_input, num_output = fit_context(*wanted, context)
        num_cut += (num_input, num_output) != wanted
        prompt = tokens.integers(0, vocab_size, num_input, dtype=np.int32)
        load.append(TimedRequest(at, prompt, num_output))
    return load, num_cut


def closed_loop(load: Sequence[TimedRequest], concurrency: int, *, seed: int, vocab_size: int) -> list[TimedRequest]:
    """Return the requests with `concurrency` of them at a time: a later one leaves when the one it follows has ended.

    The first ones begin in the midst of their answers: a random share of the tokens stands behind the prompt. So the
    ends are spread over an answer's time, and contexts are as long as later, from the start.
    """
    rng, tokens = random.Random(seed), np.random.default_rng([seed, 1])

    def begun(one: TimedRequest) -> TimedRequest:
        answered = rng.randrange(one.max_tokens)
        prompt = np.concatenate([one.prompt, tokens.integers(0, vocab_size, answered, dtype=np.int32)])
        return replace(one, at=0.0, prompt=prompt, max_tokens=one.max_tokens - answered)

    first = [begun(one) for one in load[:concurrency]]
    return first + [replace(one, at=0.0, follows=index) for index, one in enumerate(load[concurrency:])]


def fit_context(num_input: int, num_output: int, context: int) -> tuple[int, int]:
    """Return the lengths, cut so that both fit: the prompt gives way first, down to half of the context."""
    if num_input + num_output <= context:
        return num_input, num_output
    num_output = min(num_output, max(1, context // 2))
    return max(1, min(num_input, context - num_output)), num_output

"""The workloads that engines are compared on: made from seeds, the same in every process."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """Prompts of token ids and how many tokens each shall get."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)


def offline_batch(run: int = 0, *, requests: int = 256, longest: int = 1024) -> OfflineBatch:
    """The headline: prompts of 100..1024 random ids up to 10000, outputs of 100..1024 tokens, random.seed(0).

    Later runs keep every length and shift the ids, so that no prefix cache answers a prompt of an earlier run.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, longest))] for _ in range(requests)]
    max_tokens = [rng.randint(100, longest) for _ in range(requests)]
    if run:
        prompts = [[(token + 7919 * run) % 10001 for token in prompt] for prompt in prompts]
    return OfflineBatch(prompts, max_tokens)


def random_prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    return [[rng.randint(300, 100000) for _ in range(length)] for _ in range(count)]

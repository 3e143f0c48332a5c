"""Conversations with a hybrid on too few pages and places for snapshots, each answer judged by transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from exact.oracle import Oracle
from minisgl import LLM, SamplingParams
from models.tiny import VOCAB


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens and pages that the engine reused, by its own counts."""

    cached: list[list[int]]  # tokens of each prompt of a round that were in the cache
    counts: dict[str, int]
    retractions: int


def converse(oracle: Oracle, **options: object) -> Found:
    """Ask short prompts, prompts that part after 65 tokens, and continuations of their answers, in four rounds."""
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(length)]

    shared = draw(65)
    talk = [draw(25), *([*shared, *draw(length)] for length in (40, 75, 4))]
    short = [draw(length) for length in (90, 1, 17, 40, 2, 64)]
    cached = []
    with LLM(
        str(oracle.folder),
        page_size=4,
        num_page_override=62,
        state_snapshots=4,
        state_snapshot_distance=32,
        max_extend_tokens=33,
        max_running_req=4,
        batch_policy="mixed",
        target_tbt=0,
        **options,
    ) as llm:
        for prompts in (talk[:2], talk, talk, short):
            answers = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
            for prompt, answer in zip(prompts, answers, strict=True):
                oracle.check_greedy(prompt, answer["token_ids"])
            cached.append([answer["cached_tokens"] for answer in answers])
            if prompts is not short:
                for turn, answer in zip(talk, answers, strict=False):
                    turn += answer["token_ids"] + draw(9)
        found = Found(cached, llm.loop.scheduler.counts(), llm.retractions)
        llm.check_idle()
    # On from an answer's snapshot and from a prompt's; where prompts part, the first of three computes for the others.
    assert found.cached[:2] == [[0, 0], [32, 104, 0, 64]]
    assert sum(found.cached[2]) > 0
    return found

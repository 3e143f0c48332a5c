"""A hybrid's states survive chunks, mixed batches, retraction, slots that change hands, snapshots, and two ranks."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from exact.oracle import Oracle
from minisgl import LLM, SamplingParams
from models.tiny import VOCAB


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Short prompts, prompts that part behind 65 tokens, and their conversations; too few pages and snapshots."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the other ranks
    oracle, rng = Oracle("qwen3.5", tmp_path), random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(length)]

    shared = draw(65)
    talk = [draw(25), *([*shared, *draw(length)] for length in (40, 75, 4))]
    short = [draw(length) for length in (90, 1, 17, 40, 2, 64)]
    found = []
    with LLM(
        str(tmp_path),
        device="cpu",
        tp_size=2,
        page_size=4,
        num_page_override=62,
        state_snapshots=4,
        state_snapshot_distance=32,
        max_extend_tokens=33,
        max_running_req=4,
        batch_policy="mixed",
        target_tbt=0,
    ) as llm:
        for prompts in (talk[:2], talk, talk, short):
            answers = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
            for prompt, answer in zip(prompts, answers, strict=True):
                oracle.check_greedy(prompt, answer["token_ids"])
            found.append([answer["cached_tokens"] for answer in answers])
            for turn, answer in zip(talk, answers, strict=False):
                turn += answer["token_ids"] + draw(9)
        counts, retractions = llm.loop.scheduler.counts(), llm.retractions
        llm.check_idle()
    # On from an answer's snapshot and from a prompt's; where prompts part, the first of three computes for the others.
    assert found[:2] == [[0, 0], [32, 104, 0, 64]]
    assert sum(found[2]) > 0
    assert counts["snapshot_hits"] >= 5
    assert counts["snapshots_evicted"] >= 4
    assert retractions >= 1

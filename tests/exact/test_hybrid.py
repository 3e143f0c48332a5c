"""A hybrid's states survive chunks, mixed batches, retraction, slots that change hands, and their division by rank."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from exact.oracle import Oracle
from minisgl import LLM, SamplingParams
from models.tiny import VOCAB


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the other ranks
    oracle, rng = Oracle("qwen3.5", tmp_path), random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (90, 1, 17, 40, 2, 64)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(
        str(tmp_path),
        device="cpu",
        tp_size=2,
        page_size=4,
        num_page_override=37,
        max_extend_tokens=33,
        max_running_req=4,
        batch_policy="mixed",
    ) as llm:
        answers = llm.generate(prompts, params)
        assert llm.retractions >= 1
        llm.check_idle()
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check_greedy(prompt, answer["token_ids"])

"""Pages before a window are freed while requests run in a pool far too small for them; no token changes.

`test_exact.py` and `test_families.py` have windowed families too, in all kinds of batches and on several ranks. Here
the windowed group's pages are too few for one sequence, and prefixes are found whose windowed pages are partly gone.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from exact.oracle import Oracle
from minisgl import LLM, SamplingParams
from models.tiny import VOCAB

NEW_TOKENS = 20


def test_a_pool_too_small_for_the_context_serves_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    oracle, rng = Oracle("gemma3", tmp_path), random.Random(0)
    shared = [rng.randrange(VOCAB) for _ in range(140)]
    lengths = (0, 200), (140, 9), (96, 5), (0, 5), (0, 6)
    prompts = [shared[:length] + [rng.randrange(VOCAB) for _ in range(own)] for length, own in lengths]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        str(tmp_path),
        device="cpu",
        page_size=4,
        num_page_override=64,
        max_extend_tokens=16,
        max_running_req=8,
        batch_policy="mixed",
    ) as llm:
        answers = [llm.generate(prompts, params) for _ in range(2)]
        counts = llm.loop.scheduler.counts()
        assert counts["window_pages"] * 4 < len(prompts[0])
        assert counts["window_pages_given_back"] > 2 * counts["window_pages"]
        assert counts["window_pages_evicted"] > 0
        assert counts["prefix_tokens_hit"] > 0
        llm.check_idle()
    for answer in answers:
        for prompt, one in zip(prompts, answer, strict=True):
            oracle.check_greedy(prompt, one["token_ids"])

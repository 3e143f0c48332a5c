"""Every family that differs from another by its layers alone: its greedy tokens in chunks, from the cache, retracted.

Batches, policies and ranks do not depend on the family, and `test_exact.py` has them for the main ones; logits of each
family in every kind of step and on several ranks are in `tests/models`. What is left is one engine a family, with pages
too few for its requests. transformers judges each answer in one forward.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from exact.oracle import Oracle
from minisgl import LLM, SamplingParams
from models.tiny import VOCAB

KINDS = (
    "smollm3",
    "granite",
    "ministral",
    "ministral3",
    "olmo3",
    "glm",
    "glm4",
    "seed-oss",
    "exaone4",
    "ernie",
    "glm4-moe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "gemma4",
    "gemma4-parts",
    "qwen3-next",
)
WINDOWED = (
    "ministral",
    "olmo3",
    "exaone4",
    "gpt-oss",
    "gemma4",
    "gemma4-parts",
)  # their windows are shorter than the sequences
NEW_TOKENS = 24


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    oracle, rng = Oracle(kind, tmp_path), random.Random(0)
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    prompts = [shared[: 20 * (row % 4)] + [rng.randrange(VOCAB) for _ in range(5 + row)] for row in range(8)]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        str(tmp_path),
        device="cpu",
        page_size=4,
        num_page_override=60,
        state_snapshot_distance=16,
        max_extend_tokens=32,
        max_running_req=8,
    ) as llm:
        first, again = (llm.generate(prompts, params) for _ in range(2))
        assert llm.retractions >= 3
        assert sum(answer["cached_tokens"] for answer in again) > 0
        counts = llm.loop.scheduler.counts()
        assert (counts.get("window_pages_given_back", 0) > counts.get("window_pages", 0)) == (kind in WINDOWED)
        llm.check_idle()
    for prompt, one, other in zip(prompts, first, again, strict=True):
        oracle.check_greedy(prompt, one["token_ids"])
        assert other["token_ids"] == one["token_ids"]

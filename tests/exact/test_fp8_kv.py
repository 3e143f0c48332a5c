"""A KV cache in 8 bits: token for token what transformers generates when its own cache rounds K and V the same way.

What is stored is what is read, by the token itself and by all after it, so batch, pages, chunks, hits and retractions
change as little as with any other cache.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from exact.oracle import Expected, Oracle
from minisgl import LLM, SamplingParams

NEW_TOKENS = 24


class RoundedCache(DynamicCache):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(_rounded(key_states), _rounded(value_states), *args, **kwargs)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


class Case:
    """A model that rounding its cache gives other answers."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.oracle = Oracle(kind, folder)
        rounded: list[Expected] = self.oracle.greedy(random.Random(0), 16, NEW_TOKENS, RoundedCache)
        self.expected = rounded
        with self.open(page_size=16, kv_cache_dtype="auto") as llm:
            exact = self.answers(llm)
        assert sum(mine != one.tokens for mine, one in zip(exact, rounded, strict=True)) >= 3

    def open(self, *, page_size: int, tokens: int = 2400, **options: Any) -> LLM:
        return LLM(
            str(self.oracle.folder),
            device="cpu",
            page_size=page_size,
            num_page_override=tokens // page_size,
            max_running_req=16,
            **options,
        )

    def answers(self, llm: LLM) -> list[list[int]]:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        return [answer["token_ids"] for answer in llm.generate([one.prompt for one in self.expected], params)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "max_extend_tokens": 64},
        {"page_size": 4, "max_extend_tokens": 17, "tokens": 420},  # retractions
        {"page_size": 16, "batch_policy": "mixed", "max_extend_tokens": 100},
        {"page_size": 64, "cache_type": "naive", "overlap": False},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_answers_are_those_of_transformers_with_rounded_keys_and_values(case: Case, options: dict[str, Any]) -> None:
    with case.open(kv_cache_dtype="fp8_e4m3", **options) as llm:
        for _ in range(2):  # the second time from the cache
            assert case.answers(llm) == [one.tokens for one in case.expected]
        assert llm.retractions > 0 or "tokens" not in options
        llm.check_idle()


def test_the_demo_model_thinks_nearly_the_same() -> None:
    """Log-probabilities of a text under the demo model, and its answers."""
    questions = ["What is Minisgl?", "Count from 1 to 20.", "What is 12 plus 30?"]
    text = "".join(f"Question: {question} " for question in questions) * 3
    scores, answers = [], []
    for kv_cache_dtype in ("auto", "fp8_e4m3"):
        with LLM("demo", dtype="float32", device="cpu", num_page_override=64, kv_cache_dtype=kv_cache_dtype) as llm:
            (scored,) = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0))
            scores.append(torch.tensor([one.chosen.logprob for one in scored["prompt_logprobs"]]))
            chats = [[{"role": "user", "content": question}] for question in questions]
            answers.append([answer["text"] for answer in llm.chat(chats, SamplingParams(max_tokens=60))])
    difference = (scores[0] - scores[1]).abs()
    assert 0.0 < difference.mean() < 0.15
    assert answers[0] == answers[1]

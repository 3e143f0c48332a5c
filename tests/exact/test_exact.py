"""Token for token what transformers generates, whatever the page size, chunk size, cache and company."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from exact.oracle import Expected, Oracle
from minisgl import LLM, SamplingParams
from minisgl.config import CacheType

NEW_TOKENS = 64
TEMPERATURE, TOP_K = 0.8, 20


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the pairwise selection: every two values of different columns meet in some row."""

    kind: str
    page_size: int
    chunk: int
    cache: CacheType
    overlap: bool

    def open(self, folder: str) -> LLM:
        return LLM(
            folder,
            device="cpu",
            page_size=self.page_size,
            num_page_override=2400
            // self.page_size,  # less than all prompts need at once: some wait, some are evicted
            max_extend_tokens=self.chunk,
            cache_type=self.cache,
            max_running_req=16,
            overlap=self.overlap,
        )


WHOLE = 8192
SETTINGS = [
    Setting("llama", 1, 7, "radix", True),
    Setting("qwen3", 1, 64, "naive", True),
    Setting("llama", 1, WHOLE, "radix", False),
    Setting("qwen3", 4, 7, "naive", False),
    Setting("llama", 4, 64, "radix", True),
    Setting("qwen3", 4, WHOLE, "radix", True),
    Setting("qwen3", 16, 7, "radix", True),
    Setting("llama", 16, 64, "radix", False),
    Setting("llama", 16, WHOLE, "naive", True),
]


@dataclass(frozen=True, slots=True)
class Case:
    oracle: Oracle
    greedy: list[Expected]
    sampled: list[Expected]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    torch.set_num_threads(1)
    made = {}
    for kind in ("llama", "qwen3"):
        oracle = Oracle(kind, tmp_path_factory.mktemp(kind))
        rng = random.Random(0)
        made[kind] = Case(
            oracle,
            oracle.greedy(rng, 30, NEW_TOKENS),
            oracle.sampled(rng, 12, 32, temperature=TEMPERATURE, top_k=TOP_K),
        )
    return made


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_answers_are_those_of_transformers(cases: dict[str, Case], setting: Setting) -> None:
    case = cases[setting.kind]
    with setting.open(str(case.oracle.folder)) as llm:
        first, again = (_check_greedy(llm, case.greedy) for _ in range(2))
        if setting.cache == "radix":
            assert again > first  # the repeat prefilled fewer tokens
        else:
            assert first == again == 0
        for _ in range(2):
            _check_sampled(llm, case.sampled)
        llm.check_idle()


def _check_greedy(llm: LLM, expected: list[Expected]) -> int:
    """Tokens found in the cache."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    answers = llm.generate([one.prompt for one in expected], params)
    assert [answer["token_ids"] for answer in answers] == [one.tokens for one in expected]
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    return sum(answer["cached_tokens"] for answer in answers)


def _check_sampled(llm: LLM, expected: list[Expected]) -> None:
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=one.seed, max_tokens=32, ignore_eos=True)
        for one in expected
    ]
    answers = llm.generate([one.prompt for one in expected], params)
    assert [answer["token_ids"] for answer in answers] == [one.tokens for one in expected]

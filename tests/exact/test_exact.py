"""Token for token what transformers generates, whatever the family, batch, pages, chunks, cache, ranks or policy."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from exact.oracle import Expected, Oracle
from exact.pairwise import pairwise
from minisgl import LLM, SamplingParams
from scheduler.simulation import ALWAYS_IN_TURNS

NEW_TOKENS = 64
TEMPERATURE, TOP_K = 0.8, 20
WHOLE = 8192  # more than any prompt: no chunks

# All prompts of the first issue's table go to these; the other kinds get fewer, to keep the suite short.
MAIN_KINDS = ("llama", "qwen3")
WINDOWED = ("qwen2-window", "mistral-window", "gemma3")  # some layers give back the pages behind their window
MAIN_COLUMNS = {
    "kind": MAIN_KINDS,
    "page_size": (1, 4, 16),
    "chunk": (7, 64, WHOLE),
    "cache": ("radix", "naive"),
    "overlap": (True, False),
}
ALL_COLUMNS = {
    "kind": (
        *MAIN_KINDS,
        "qwen2-window",
        "mistral-window",
        "qwen3-moe",
        "llama-linear",
        "llama-yarn",
        "gemma3",
        "olmo2",
        "phi3-partial",
    ),
    "page_size": (1, 4, 16),
    "chunk": (7, 64, WHOLE),
    "cache": ("radix", "naive"),
    "tp": (1, 2, 3),
    "batch_policy": ("prefill-first", "mixed", "mixed, in turns"),
    "target_tbt": (0.0, 2.0, 35.0),
    "schedule_policy": ("sjf", "lpm"),
    "overlap": (True, False),
    "tight": (False, True),  # True: so few pages that requests are retracted
}


@dataclass(frozen=True, slots=True)
class Case:
    oracle: Oracle
    greedy: list[Expected]
    sampled: list[Expected]


class Cases:
    """Oracles by kind, made when first asked for."""

    def __init__(self, make_folder: Any) -> None:
        self._make_folder = make_folder
        self._made: dict[tuple[str, int], Case] = {}
        self._outgrowing: dict[str, list[Expected]] = {}

    def get(self, kind: str, prompts: int, new_tokens: int) -> Case:
        key = kind, prompts
        if key not in self._made:
            oracle = Oracle(kind, self._make_folder(kind))
            rng = random.Random(0)
            self._made[key] = Case(
                oracle,
                oracle.greedy(rng, prompts, new_tokens),
                oracle.sampled(rng, max(prompts // 3, 4), new_tokens // 2, temperature=TEMPERATURE, top_k=TOP_K),
            )
        return self._made[key]

    def outgrowing(self, kind: str) -> list[Expected]:
        """Short prompts that are all admitted at once, with answers that a tight cache does not hold together."""
        if kind not in self._outgrowing:
            oracle = self.get(kind, 8, 32).oracle
            self._outgrowing[kind] = oracle.greedy(random.Random(1), 16, NEW_TOKENS, longest=12)
        return self._outgrowing[kind]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the other ranks
    return Cases(tmp_path_factory.mktemp)


def open_llm(case: Case, *, page_size: int, chunk: int, tokens: int, **options: Any) -> LLM:
    """`tokens`: of the KV cache. All prompts at once need about 5,000 and more with their answers."""
    return LLM(
        str(case.oracle.folder),
        device="cpu",
        page_size=page_size,
        num_page_override=tokens // page_size,
        max_extend_tokens=chunk,
        max_running_req=16,
        **options,
    )


@pytest.mark.parametrize("row", pairwise(MAIN_COLUMNS), ids=lambda row: ",".join(map(str, row.values())))
def test_answers_are_those_of_transformers(cases: Cases, row: dict[str, Any]) -> None:
    row = dict(row)
    case = cases.get(row.pop("kind"), 30, NEW_TOKENS)
    cache = row.pop("cache")
    with open_llm(case, cache_type=cache, tokens=2400, **row) as llm:
        first, again = (check_greedy(llm, case.greedy) for _ in range(2))
        if cache == "radix":
            assert again > first  # the repeat prefilled fewer tokens
        else:
            assert first == again == 0
        for _ in range(2):
            check_sampled(llm, case.sampled)
        llm.check_idle()


@pytest.mark.parametrize("row", pairwise(ALL_COLUMNS), ids=lambda row: ",".join(map(str, row.values())))
def test_every_family_policy_and_number_of_ranks(
    cases: Cases, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dict(row)
    if row["batch_policy"] == "mixed, in turns":  # a CPU takes none: its decodes cost as much on their own
        monkeypatch.setattr("minisgl.engine.engine.estimate_cost", lambda *_: ALWAYS_IN_TURNS)
        row["batch_policy"] = "mixed"
    kind, tight, tp = row.pop("kind"), row.pop("tight"), row.pop("tp")
    case = cases.get(kind, 8, 32)
    greedy, sampled = (case.greedy, case.sampled) if tp == 1 else (fewer(case.greedy), fewer(case.sampled))
    tokens = 336 if tight else 2400
    cache, whole = row.pop("cache"), kind == "qwen3-moe" and tp == 2  # three ranks have a share of each expert
    with open_llm(case, tp_size=tp, enable_expert_parallel=whole, cache_type=cache, tokens=tokens, **row) as llm:
        for _ in range(2 if cache == "radix" else 1):  # the second time from the cache
            check_greedy(llm, greedy)
        check_sampled(llm, sampled)
        if tight:
            for _ in range(6):  # pages of 16 tokens are outgrown five times a round, of 1 token fifteen times
                check_greedy(llm, cases.outgrowing(kind))
                if llm.retractions >= 20:
                    break
            assert llm.retractions >= 20
        assert (llm.loop.scheduler.counts().get("window_pages_given_back", 0) > 0) == (kind in WINDOWED)
        llm.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_twenty_retractions_change_nothing(cases: Cases, overlap: bool) -> None:
    case = cases.get("qwen3", 30, NEW_TOKENS)
    with open_llm(case, page_size=1, chunk=64, tokens=420, overlap=overlap) as llm:
        for _ in range(2):
            check_greedy(llm, case.greedy)
        check_sampled(llm, case.sampled)
        assert llm.retractions >= 20
        llm.check_idle()


def test_ranks_choose_the_same_token(cases: Cases) -> None:
    """Sampled, at a temperature where a differing bit would soon show: a rank that parts makes the others wrong."""
    case = cases.get("qwen3", 8, 32)
    with open_llm(case, page_size=4, chunk=64, tokens=2400, tp_size=2) as llm:
        for _ in range(3):
            check_sampled(llm, case.sampled)


def fewer(expected: list[Expected]) -> list[Expected]:
    """Half of the prompts and answers: ranks that share few cores wait for one another in every layer."""
    return [replace(one, tokens=one.tokens[: len(one.tokens) // 2]) for one in expected[::2]]


def check_greedy(llm: LLM, expected: list[Expected]) -> int:
    """Tokens found in the cache."""
    params = SamplingParams(max_tokens=len(expected[0].tokens), ignore_eos=True)
    answers = llm.generate([one.prompt for one in expected], params)
    assert [answer["token_ids"] for answer in answers] == [one.tokens for one in expected]
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    return sum(answer["cached_tokens"] for answer in answers)


def check_sampled(llm: LLM, expected: list[Expected]) -> None:
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=one.seed, max_tokens=len(one.tokens), ignore_eos=True)
        for one in expected
    ]
    answers = llm.generate([one.prompt for one in expected], params)
    assert [answer["token_ids"] for answer in answers] == [one.tokens for one in expected]

"""The demo model on a GPU: its answers are those of the CPU, and its scores in bfloat16 as well."""

from __future__ import annotations

import pytest
import torch

from demo_model.case import Case
from demo_model.skills import SKILLS, make_case
from minisgl import LLM, SamplingParams
from support.gpus import in_new_process, over_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES_OF_A_SKILL = 6


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Unseen ones. Together they fill decodes of all sizes down to one row."""
    made = [make_case(skill, 5000 + number, context=900) for skill in SKILLS for number in range(CASES_OF_A_SKILL)]
    return [case for case in made if case.prompt is None]


@pytest.fixture(scope="module")
def on_the_cpu(cases: list[Case]) -> list[str]:
    return answers(cases, "cpu", "float32", 1)


def answers(cases: list[Case], device: str, dtype: str, tp_size: int) -> list[str]:
    with LLM("demo", dtype, device=device, tp_size=tp_size) as llm:
        prompts = [
            llm.tokenizer.encode_chat(list(case.messages), case.tools and list(case.tools), case.chat_template_kwargs)
            for case in cases
        ]
        params = [SamplingParams(temperature=0.0, max_tokens=case.max_tokens) for case in cases]
        ids = [answer["token_ids"] for answer in llm.generate(prompts, params)]
        return [llm.tokenizer.decode(one, skip_special_tokens=False).removesuffix("<|im_end|>") for one in ids]


def score(cases: list[Case], texts: list[str]) -> int:
    return sum(case.check(text) for case, text in zip(cases, texts, strict=True))


def test_answers_in_float32_are_those_of_the_cpu(cases: list[Case], on_the_cpu: list[str]) -> None:
    assert score(cases, on_the_cpu) >= 0.9 * len(cases)
    assert answers(cases, "cuda", "float32", 1) == on_the_cpu


@over_gpus(1, 2, 4)
def test_the_score_in_bfloat16_is_that_of_the_cpu(cases: list[Case], on_the_cpu: list[str], tp_size: int) -> None:
    """One case in fifty may differ, where two tokens are nearly as likely."""
    texts = in_new_process(answers, cases, "cuda", "bfloat16", tp_size)
    assert abs(score(cases, texts) - score(cases, on_the_cpu)) <= len(cases) // 50 + 1

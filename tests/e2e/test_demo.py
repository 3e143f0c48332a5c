"""The demo model on a real server: wrong paging, chunking or caching shows as wrong answers.

CI asks a few cases of each skill; `scripts/test tests/e2e --demo-cases 100` asks hundreds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from demo_model.case import message_text
from demo_model.skills import SKILLS, Case, make_case
from support.server import Server

EXACT_SKILLS = ("recall", "copy", "tools", "json")  # these skills test the cache; the model alone scores 98% and more
# A whole server's score: the model's, less what chance takes from a small sample.
EXACT_SHARE, OTHER_SHARE = 0.93, 0.85

SETTINGS: dict[str, tuple[str, ...]] = {
    "default flags": (),
    "few pages, small chunks": ("--page-size", "16", "--num-pages", "400", "--max-prefill-length", "32"),
    "two ranks, mixed batches": ("--tp", "2", "--batch-policy", "mixed", "--max-prefill-length", "256"),
    "small pages, longest prefix first": ("--page-size", "4", "--schedule-policy", "lpm"),
    "naive cache, no overlap": ("--cache", "naive", "--disable-overlap", "--page-size", "1"),
}


def ask(server: Server, case: Case) -> tuple[str, int]:
    """The answer, and how much of the prompt was found in the cache."""
    params: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": case.max_tokens}
    if case.prompt is not None:
        completion = server.client.completions.create(prompt=case.prompt, **params)
        return completion.choices[0].text, completion.usage.prompt_tokens_details.cached_tokens  # type: ignore
    if case.tools:
        params["tools"] = list(case.tools)
    if case.chat_template_kwargs:
        params["extra_body"] = {"chat_template_kwargs": case.chat_template_kwargs}
    chat = server.client.chat.completions.create(messages=list(case.messages), **params)  # type: ignore[arg-type]
    return message_text(chat.choices[0].message.model_dump()), chat.usage.prompt_tokens_details.cached_tokens


def ask_all(server: Server, cases: list[Case]) -> tuple[list[str], int]:
    """All answers, asked eight at a time, and the cached tokens of all."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: ask(server, case), cases))
    return [text for text, _ in answers], sum(cached for _, cached in answers)


def check_scores(cases: list[Case], answers: list[str]) -> None:
    right = [case.check(answer) for case, answer in zip(cases, answers, strict=True)]
    for skills, share in ((EXACT_SKILLS, EXACT_SHARE), (set(SKILLS) - set(EXACT_SKILLS), OTHER_SHARE)):
        results = [ok for case, ok in zip(cases, right, strict=True) if case.skill in skills]
        wrong = [
            (case.skill, case.output, answer)
            for case, answer, ok in zip(cases, answers, right, strict=True)
            if not ok and case.skill in skills
        ]
        assert sum(results) / len(results) >= share, wrong


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[Case]:
    count: int = request.config.getoption("--demo-cases")
    return [
        make_case(skill, 5000 + number, context=500 if count < 10 else 1900)
        for skill in SKILLS
        for number in range(count)
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_scores_under_every_setting(setting: str, cases: list[Case]) -> None:
    with Server("--model", "demo", *SETTINGS[setting]) as server:
        answers, _ = ask_all(server, cases)
        server.wait_idle()
    check_scores(cases, answers)


def test_scores_among_retractions(cases: list[Case], request: pytest.FixtureRequest) -> None:
    """Other answers outgrow the pool, so that the newest requests are retracted again and again."""
    short = request.config.getoption("--demo-cases") < 10  # contexts: see `cases`
    num_pages, num_growers, length = (400, 24, 160) if short else (1024, 48, 256)

    def grow(server: Server, number: int) -> int:
        answer = server.client.completions.create(
            model="demo",
            prompt=f"{number} is a number",
            temperature=0,
            max_tokens=length,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    pool = ("--page-size", "4", "--num-pages", str(num_pages), "--schedule-policy", "lpm")
    with Server("--model", "demo", *pool) as server, ThreadPoolExecutor(num_growers) as growers:
        grown = [growers.submit(grow, server, number) for number in range(2 * num_growers)]
        answers, _ = ask_all(server, cases)
        assert [one.result() for one in grown] == [length] * 2 * num_growers
        server.wait_idle()
        assert server.info()["scheduler-0"]["retractions"] >= 20
    check_scores(cases, answers)


def test_shared_prefixes_change_no_answer(cases: list[Case]) -> None:
    """Conversations asked turn by turn and then all again: most prompts are found in the cache."""
    with Server("--model", "demo", "--dtype", "float32") as server:
        first, _ = ask_all(server, cases)
        again, cached = ask_all(server, cases)
        server.wait_idle()
    check_scores(cases, first)
    assert sum(a != b for a, b in zip(first, again, strict=True)) <= len(cases) // 50  # near ties
    prompt_chars = sum(len(json.dumps(list(case.messages))) for case in cases)
    assert cached > prompt_chars / 4


def test_a_few_words_with_a_newcomer() -> None:
    """The README's first minute: start, ask with curl, a correct sentence."""
    begin = time.perf_counter()
    with Server() as server:
        url = f"{server.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "What is Minisgl?"}], "temperature": 0}
        out = subprocess.run(
            ["curl", "-s", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)],
            capture_output=True,
            check=True,
        ).stdout
        print(f"first answer after {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    answer = json.loads(out)["choices"][0]["message"]["content"]
    assert "inference server" in answer


def test_transformers_gives_the_same_tokens_in_float32(cases: list[Case]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from minisgl import LLM, SamplingParams
    from minisgl.models.hub import demo_folder

    some = [case for case in cases if case.prompt is None][:: max(1, len(cases) // 12)]
    with LLM("demo", dtype="float32") as llm:
        ids = [
            llm.tokenizer.encode_chat(list(case.messages), case.tools and list(case.tools), case.chat_template_kwargs)
            for case in some
        ]
        answers = llm.generate(ids, [SamplingParams(max_tokens=case.max_tokens) for case in some])
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
    for prompt, answer, case in zip(ids, answers, some, strict=True):
        inputs = torch.from_numpy(prompt)[None].long()
        with torch.inference_mode():
            out = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=case.max_tokens
            )
        assert out[0, len(prompt) :].tolist() == answer["token_ids"]

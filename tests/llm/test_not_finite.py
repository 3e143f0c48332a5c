"""A model that computes NaN for some prompts: these end with an error that says so, and all others are exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from minisgl import LLM
from minisgl.sampling_params import Grammar, SamplingParams
from support.server import Server
from support.small_models import save_tiny_qwen3, spoil_token

BAD = 200  # token whose embedding is NaN
BAD_PROMPT = [*range(2, 10), BAD, *range(20, 30)]
GOOD_PROMPTS = [list(range(start, start + 19)) for start in (2, 30, 60, 90, 120)]
MESSAGE = "the model's logits are NaN or infinite, so no token can be chosen"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "damaged"
    save_tiny_qwen3(folder, max_position_embeddings=512, tie_word_embeddings=False)
    spoil_token(folder, BAD)
    return folder


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bad_prompt_ends_alone(damaged: Path, overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Bad and good prompts share steps, and good ones get the pages that bad ones had."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    with LLM(str(damaged), page_size=8, num_page_override=24, overlap=overlap) as llm:
        expected = [answer["token_ids"] for answer in llm.generate(GOOD_PROMPTS, params)]
        assert all(len(ids) == 12 for ids in expected)
        variants = [
            SamplingParams(max_tokens=12, temperature=0.0),
            SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, logprobs=2, prompt_logprobs=1),
            SamplingParams(max_tokens=12, presence_penalty=1.0),
            SamplingParams(max_tokens=12, grammar=Grammar("regex", "a+")),
            SamplingParams(max_tokens=0, prompt_logprobs=1),
        ]
        for one in variants:
            prompts = [BAD_PROMPT, *GOOD_PROMPTS[:2], BAD_PROMPT[5:], *GOOD_PROMPTS[2:]]
            answers = llm.generate(prompts, [one if BAD in prompt else params for prompt in prompts])
            reasons = [answer["finish_reason"] for answer in answers]
            assert reasons == ["error", "length", "length", "error", "length", "length", "length"]
            assert [answer["token_ids"] for answer in answers if answer["finish_reason"] == "length"] == expected
            assert [answers[0]["token_ids"], answers[3]["token_ids"]] == [[], []]
        llm.check_idle()
    assert caplog.text.count("the model computed NaN or infinite values") == 1


@contextmanager
def broken_memory(llm: LLM) -> Iterator[None]:
    """Let all that rank 0 computes be NaN, which the others then receive from it."""
    runner: Any = llm._engine._runner
    weight = next(runner.model.model.layers[0].attention_norm.parameters())
    kept = weight.clone()
    with torch.inference_mode():
        weight.fill_(torch.nan)
        yield
        weight.copy_(kept)


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": False}, {"max_extend_tokens": 10}, {"max_extend_tokens": 10, "overlap": False}, {"tp_size": 2}],
    ids=str,
)
def test_nan_does_not_stay_in_the_cache(damaged: Path, settings: dict[str, Any]) -> None:
    """Prompts that failed are computed again, and what other requests had cached is used as before."""
    shared, tail = GOOD_PROMPTS[0], [*GOOD_PROMPTS[1], *GOOD_PROMPTS[2]]
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    with LLM(str(damaged), page_size=8, num_page_override=64, **settings) as llm:
        expected = llm.generate([[*shared, *tail]], params)[0]["token_ids"]
        llm.loop.scheduler.flush_cache()
        llm.generate([shared], params)
        cached = llm.loop.scheduler.counts()["pages_cached"]
        with broken_memory(llm):
            failed = llm.generate([[*shared, *tail]] * 3, params)
        assert [answer["finish_reason"] for answer in failed] == ["error"] * 3
        assert llm.loop.scheduler.counts()["pages_cached"] == cached
        again = llm.generate([[*shared, *tail], tail], params)
        assert [answer["finish_reason"] for answer in again] == ["length", "length"]
        assert again[0]["token_ids"] == expected
        assert [answer["cached_tokens"] for answer in again] == [len(shared) // 8 * 8, 0]
        llm.check_idle()


def test_a_server_names_the_error(damaged: Path) -> None:
    with Server("--model", str(damaged), "--page-size", "8", "--num-pages", "64") as server:
        body = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
        url = f"{server.url}/v1/completions"
        good = httpx.post(url, json={**body, "prompt": GOOD_PROMPTS[0]}, timeout=120).json()
        bad = httpx.post(url, json={**body, "prompt": BAD_PROMPT}, timeout=120)
        assert (bad.status_code, bad.headers["x-should-retry"]) == (500, "false")
        assert bad.json()["error"] == {
            "message": MESSAGE,
            "type": "server_error",
            "param": None,
            "code": "logits_not_finite",
        }
        with pytest.raises(openai.APIError, match="NaN or infinite"):
            list(server.client.completions.create(model="damaged", prompt=BAD_PROMPT, stream=True))
        again = httpx.post(url, json={**body, "prompt": GOOD_PROMPTS[0]}, timeout=120).json()
        assert again["choices"][0]["text"] == good["choices"][0]["text"]
        metrics = httpx.get(f"{server.url}/metrics", timeout=120).text
        assert 'vllm:request_success_total{finished_reason="error",model_name="damaged"} 2.0' in metrics
        server.wait_idle()
    assert len([line for line in server.log if "the model computed NaN or infinite values" in line]) == 1

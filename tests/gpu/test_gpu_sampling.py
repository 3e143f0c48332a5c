"""Penalties, biases, forbidden ids and log-probabilities on a GPU, beside rows that ask for nothing, with graphs.

Greedy rows are judged by the log-probabilities that come with them: they differ from the logits by a constant, so the
chosen token must be the best of the returned alternatives once these are changed as the request asks.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.llm.completion import Completion
from support.small_models import save_qwen3

pytestmark = pytest.mark.gpu

VOCAB = 5000
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(
        tmp_path_factory.mktemp("qwen3"), weights=True, vocab_size=VOCAB, num_layers=2, max_position_embeddings=1024
    )


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(0)
    common = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 20}
    params = []
    for _ in range(4):
        word = tuple(rng.randrange(VOCAB) for _ in range(2))
        params += [
            SamplingParams(**common),
            SamplingParams(**common, frequency_penalty=0.8),
            SamplingParams(**common, presence_penalty=1.2, frequency_penalty=-0.1),
            SamplingParams(**common, logit_bias=tuple((token, 1.5) for token in range(0, VOCAB, 7))),
            SamplingParams(**common, allowed_token_ids=tuple(range(100, 1100)), bad_words_ids=(word,)),
            SamplingParams(max_tokens=NEW_TOKENS, temperature=0.7, seed=5, ignore_eos=True),
            SamplingParams(max_tokens=NEW_TOKENS, temperature=0.7, top_p=0.9, seed=5, ignore_eos=True),
            SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True),
            SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=2),
            SamplingParams(max_tokens=0, prompt_logprobs=0),
        ]
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 300))] for _ in params], params


def check_choices(answer: Completion, sampling: SamplingParams) -> None:
    """Every token is the best of its alternatives, changed as asked."""
    biases, counts = dict(sampling.logit_bias), dict.fromkeys(answer["token_ids"], 0)
    assert len(answer["logprobs"]) == len(answer["token_ids"])
    for token, found in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert found.chosen.token == token

        def score(token: int, logprob: float) -> float:
            count = counts.get(token, 0)
            penalty = sampling.presence_penalty * (count > 0) + sampling.frequency_penalty * count
            return logprob + biases.get(token, 0.0) - penalty

        allowed = sampling.allowed_token_ids
        scores = [score(one.token, one.logprob) for one in found.top if allowed is None or one.token in allowed]
        assert score(token, found.chosen.logprob) >= max(scores, default=-1e9) - 1e-4
        assert allowed is None or token in allowed
        for one in found.top:
            assert one.token != token or one == found.chosen
        assert [one.logprob for one in found.top] == sorted((one.logprob for one in found.top), reverse=True)
        counts[token] += 1


@pytest.mark.parametrize("graph", [None, 0])
def test_every_row_gets_what_it_asked_for(folder: Path, graph: int | None) -> None:
    from transformers import AutoModelForCausalLM

    prompts, params = requests()
    with LLM(
        str(folder), device="cuda", num_page_override=600, page_size=16, max_extend_tokens=700, cuda_graph_max_bs=graph
    ) as llm:
        first, second = (llm.generate(prompts, params) for _ in range(2))
        llm.check_idle()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    for answers in (first, second):
        for prompt, answer, sampling in zip(prompts, answers, params, strict=True):
            assert len(answer["token_ids"]) == sampling.max_tokens
            if sampling.logprobs is not None:
                check_choices(answer, sampling)
            if sampling.prompt_logprobs is not None:
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt], device="cuda")).logits[0, :-1].float()
                expected = torch.log_softmax(logits, dim=1)[torch.arange(len(prompt) - 1), prompt[1:]].cpu()
                found = torch.tensor([one.chosen.logprob for one in answer["prompt_logprobs"]])
                assert [one.chosen.token for one in answer["prompt_logprobs"]] == prompt[1:]
                assert (found - expected).abs().max() < 0.15


def test_seeded_rows_do_not_notice_processed_company(folder: Path) -> None:
    """Seeded tokens are the same beside rows with penalties as beside as many plain ones."""
    prompts, params = requests()
    seeded = [index for index, one in enumerate(params) if one.temperature > 0]
    plain = [
        one
        if index in seeded or one.prompt_logprobs is not None
        else SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        for index, one in enumerate(params)
    ]
    with LLM(str(folder), device="cuda", num_page_override=600, page_size=16, cache_type="naive") as llm:
        processed, unprocessed = llm.generate(prompts, params), llm.generate(prompts, plain)
    assert plain != params
    for index in seeded:
        assert processed[index]["token_ids"] == unprocessed[index]["token_ids"]

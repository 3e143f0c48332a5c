"""Penalties, biases, forbidden ids and log-probabilities through the whole engine, against transformers' logits.

The oracle chooses token by token from transformers' float32 logits, changed in plain Python. Prompts are such that no
choice is near another.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from exact.oracle import LOGIT_MARGIN, choose
from minisgl import LLM, SamplingParams
from minisgl.message.logprobs import PositionLogprobs
from minisgl.seeds import choice_seed
from models.tiny import SHAPE, VOCAB, make_model
from support.tiny_tokenizer import save_byte_tokenizer

TOLERANCE = 1e-4
EOS = int(SHAPE["eos_token_id"])
TOP_K = 20


@dataclass
class Answer:
    """Answer of the oracle to a prompt."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish: str = "length"
    logprobs: list[list[float]] = field(default_factory=list)  # a distribution for each output token
    prompt_logprobs: list[list[float]] = field(default_factory=list)  # the same for each prompt token but the first


class Oracle:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model: Any = make_model("qwen3")
        self._model.save_pretrained(folder)
        save_byte_tokenizer(folder, VOCAB)

    @torch.inference_mode()
    def answer(self, prompt: list[int], sampling: SamplingParams) -> Answer | None:
        """None if a choice is within rounding of another."""
        answer = Answer(prompt, sampling)
        logits = self._model(torch.tensor([prompt])).logits[0].double()
        answer.prompt_logprobs = torch.log_softmax(logits[:-1], dim=1).tolist()
        assert sampling.max_tokens is not None
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        while len(answer.tokens) < sampling.max_tokens:
            logits = self._model(torch.tensor([prompt + answer.tokens])).logits[0, -1].double()
            changed = change(logits.tolist(), prompt, answer.tokens, sampling, stops)
            token = pick(torch.tensor(changed, dtype=torch.float64), len(prompt) + len(answer.tokens), sampling)
            if token is None:
                return None
            answer.tokens.append(token)
            answer.logprobs.append(torch.log_softmax(logits, dim=0).tolist())
            if token in stops:
                answer.finish = "stop"
                break
        return answer


def change(
    logits: list[float], prompt: list[int], output: list[int], asked: SamplingParams, stops: set[int]
) -> list[float]:
    """The logits as the request wants them, by the book."""
    x = list(logits)
    for token, bias in asked.logit_bias:
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / asked.repetition_penalty if x[token] > 0 else x[token] * asked.repetition_penalty
    for token in set(output):
        x[token] -= asked.presence_penalty + asked.frequency_penalty * output.count(token)
    forbidden = set(stops) if len(output) < asked.min_tokens else set()
    for *begin, last in asked.bad_words_ids:
        if output[len(output) - len(begin) :] == begin:
            forbidden.add(last)
    if asked.allowed_token_ids is not None:
        forbidden |= set(range(VOCAB)) - set(asked.allowed_token_ids)
    return [-math.inf if token in forbidden else value for token, value in enumerate(x)]


def pick(logits: torch.Tensor, position: int, sampling: SamplingParams) -> int | None:
    if not sampling.greedy:
        assert sampling.seed is not None
        seed = choice_seed(sampling.seed, 0)
        return choose(logits.numpy(), seed, position, sampling.temperature, sampling.top_k)
    best = logits.topk(2)
    return None if best.values[0] - best.values[1] < LOGIT_MARGIN else int(best.indices[0])


def questions(plain: Answer, rng: random.Random) -> list[SamplingParams]:
    """Return parameters each of which changes the answer to a prompt that would have been `plain`."""
    told = plain.tokens
    asked = [
        SamplingParams(),
        SamplingParams(frequency_penalty=1.2, logprobs=0),
        SamplingParams(presence_penalty=-1.5, prompt_logprobs=3),
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, logprobs=5, prompt_logprobs=0),
        SamplingParams(logit_bias=tuple((token, -4.0) for token in set(told[:6])), logprobs=2),
        SamplingParams(bad_words_ids=((told[0],), tuple(told[2:5]), tuple(told[1:3]), (told[9], told[10]))),
        SamplingParams(allowed_token_ids=tuple(sorted(rng.sample(range(VOCAB), 40))), logprobs=20),
        SamplingParams(min_tokens=9, stop_token_ids=(told[1], told[4])),
        SamplingParams(stop_token_ids=(told[4],), logprobs=1),
        SamplingParams(max_tokens=0, prompt_logprobs=20),
        SamplingParams(temperature=0.8, top_k=TOP_K, seed=rng.getrandbits(40), frequency_penalty=0.7, logprobs=3),
        SamplingParams(temperature=0.8, top_k=TOP_K, seed=rng.getrandbits(40), bad_words_ids=((told[0],),)),
        SamplingParams(temperature=0.8, top_k=TOP_K, seed=rng.getrandbits(40), logprobs=4, prompt_logprobs=1),
    ]
    return [
        msgspec.structs.replace(one, ignore_eos=not one.min_tokens, max_tokens=24 if one.max_tokens else 0)
        for one in asked
    ]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[Answer]:
    """Each kind of request once for a short and once for a long prompt, and every one changes the answer."""
    rng = random.Random(0)
    found: list[Answer] = []
    for length in (9, 120):
        kinds: dict[int, Answer] = {}
        while len(kinds) < 13:
            prompt = [rng.randrange(VOCAB) for _ in range(length)]
            plain = oracle.answer(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
            if plain is None:
                continue
            for kind, sampling in enumerate(questions(plain, rng)):
                if kind not in kinds and (answer := oracle.answer(prompt, sampling)) is not None:
                    changes = sampling.processed or sampling.stop_token_ids
                    if not changes or answer.tokens != plain.tokens:
                        kinds[kind] = answer
        found += kinds.values()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 4, "max_extend_tokens": 7, "num_page_override": 70},  # few pages: requests are retracted
        {"page_size": 1, "max_extend_tokens": 50, "batch_policy": "mixed", "overlap": False, "num_page_override": 260},
        {"page_size": 16, "tp_size": 2},
    ],
    ids=str,
)
def test_answers_and_logprobs_are_those_of_transformers(
    oracle: Oracle, expected: list[Answer], options: dict[str, Any]
) -> None:
    with LLM(str(oracle.folder), device="cpu", max_running_req=12, max_seq_len_override=256, **options) as llm:
        for _ in range(2):  # again, with the prompts in the prefix cache
            answers = llm.generate([one.prompt for one in expected], [one.sampling for one in expected])
            for answer, wanted in zip(answers, expected, strict=True):
                assert answer["token_ids"] == wanted.tokens, wanted.sampling
                assert answer["finish_reason"] == wanted.finish
                for key, tokens, distributions in (
                    ("logprobs", wanted.tokens, wanted.logprobs),
                    ("prompt_logprobs", wanted.prompt[1:], wanted.prompt_logprobs),
                ):
                    top = getattr(wanted.sampling, key)
                    if top is None:
                        assert key not in answer
                    else:
                        check(answer[key], tokens, distributions, top)  # type: ignore[literal-required]
        if "num_page_override" in options:
            assert llm.retractions > 0
        llm.check_idle()


def test_processed_logprobs_are_of_what_is_sampled_from(oracle: Oracle, expected: list[Answer]) -> None:
    # The oracle keeps log-probabilities, whose signs, which the repetition penalty looks at, are not the logits'.
    asking = [one for one in expected if one.sampling.logprobs is not None and one.sampling.repetition_penalty == 1.0]
    asking += [  # greedy by top_k, and yet with a temperature
        replace(one, sampling=msgspec.structs.replace(one.sampling, temperature=0.5, top_k=1))
        for one in asking
        if one.sampling.greedy
    ]
    with LLM(str(oracle.folder), device="cpu", page_size=4, logprobs_mode="processed_logprobs") as llm:
        answers = llm.generate([one.prompt for one in asking], [one.sampling for one in asking])
    for answer, wanted in zip(answers, asking, strict=True):
        assert answer["token_ids"] == wanted.tokens
        for at, found in enumerate(answer["logprobs"]):
            changed = change(wanted.logprobs[at], wanted.prompt, wanted.tokens[:at], wanted.sampling, set())
            scaled = torch.tensor(changed, dtype=torch.float64) / (wanted.sampling.temperature or 1.0)
            distribution = torch.log_softmax(scaled, dim=0)
            assert found.chosen.logprob == pytest.approx(float(distribution[found.chosen.token]), abs=TOLERANCE)
            best = distribution.topk(len(found.top)).values.tolist()
            assert [token.logprob for token in found.top] == pytest.approx(best, abs=TOLERANCE)


def check(found: list[PositionLogprobs], tokens: list[int], distributions: list[list[float]], top: int) -> None:
    assert [one.chosen.token for one in found] == tokens
    for one, distribution in zip(found, distributions, strict=True):
        chosen = distribution[one.chosen.token]
        assert one.chosen.logprob == pytest.approx(chosen, abs=TOLERANCE)
        surely_above = sum(value > chosen + TOLERANCE for value in distribution)
        perhaps_above = sum(value > chosen - TOLERANCE for value in distribution)
        assert surely_above < one.rank <= perhaps_above
        assert len({token.token for token in one.top}) == len(one.top) == top
        for token, value in zip(one.top, sorted(distribution, reverse=True)[:top], strict=True):
            assert token.logprob == pytest.approx(value, abs=TOLERANCE)
            assert token.logprob == pytest.approx(distribution[token.token], abs=TOLERANCE)
            if token.token == one.chosen.token:
                assert token == one.chosen  # bit for bit

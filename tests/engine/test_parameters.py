"""Sampling parameters are refused by name and limit, and the defaults ask for nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minisgl.limits import Limits
from minisgl.sampling_params import Grammar, InvalidRequest, SamplingFlags, SamplingParams, resolve_max_tokens

LIMITS = Limits(max_seq_len=100, vocab_size=50)
NAN, INF = math.nan, math.inf
SAMPLED, FILTERED, PROCESSED = SamplingFlags.SAMPLED, SamplingFlags.FILTERED, SamplingFlags.PROCESSED


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *[
            (name, value, "between -2 and 2")
            for name in ("presence_penalty", "frequency_penalty")
            for value in (2.1, NAN)
        ],
        *[("repetition_penalty", value, "between 0.01 and 10") for value in (0.0, -1.0, 1e-40, 10.5, INF, NAN)],
        ("min_tokens", -1, "between 0 and 20"),
        ("min_tokens", 21, "between 0 and 20"),
        ("logit_bias", ((50, 1.0),), "token id 50 is outside the vocabulary of 50"),
        ("logit_bias", ((-1, 1.0),), "token id -1"),
        ("logit_bias", ((1, 100.5),), "between -100 and 100, not 100.5"),
        ("logit_bias", ((1, NAN),), "not nan"),
        ("logit_bias", ((1, 1.0),) * 1025, "at most 1024"),
        ("allowed_token_ids", (), "1 to 50 ids, not 0"),
        ("allowed_token_ids", (3, 50), "token id 50"),
        ("allowed_token_ids", (-1, 3), "token id -1"),
        ("allowed_token_ids", (1,) * 51, "1 to 50 ids"),
        ("bad_words", ("a",) * 129, "at most 128"),
        ("bad_words", ("",), "1 to 1024 characters"),
        ("bad_words", ("a" * 1025,), "1 to 1024 characters"),
        ("bad_words_ids", ((),), "1 to 16 tokens"),
        ("bad_words_ids", ((1,) * 17,), "1 to 16 tokens"),
        ("bad_words_ids", ((1, 50),), "outside the vocabulary"),
        ("bad_words_ids", ((-1, 3),), "outside the vocabulary"),
        *[(name, value, "between 0 and 20") for name in ("logprobs", "prompt_logprobs") for value in (-1, 21)],
        ("max_tokens", 0, "at least 1"),
        ("grammar", Grammar("template", "start: "), "made by the server only"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object, words: str) -> None:
    params = SamplingParams(**{"max_tokens": 20, field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=words) as refused:
        params.validate(LIMITS)
    assert refused.value.field == field
    assert field.split("_ids")[0] in refused.value.message or "bad word" in refused.value.message


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(
        max_tokens=20,
        min_tokens=20,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=10.0,
        logit_bias=((0, -100.0), (49, 100.0)),
        allowed_token_ids=tuple(range(50)),
        bad_words=("a" * 1024,),
        bad_words_ids=((49,) * 16,),
        logprobs=20,
        prompt_logprobs=0,
    ).validate(LIMITS)


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({}, 0),
        ({"temperature": 1e-6, "top_p": 0.5}, 0),
        ({"temperature": 1.0, "top_k": 1}, 0),
        *[({"temperature": 1.0, "top_k": top_k}, SAMPLED) for top_k in (-1, 0)],
        *[
            ({"temperature": 1.0, **filters}, SAMPLED | FILTERED)
            for filters in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1})
        ],
        *[
            (change, PROCESSED)
            for change in (
                {"presence_penalty": -0.5},
                {"frequency_penalty": 0.5},
                {"repetition_penalty": 0.9},
                {"min_tokens": 1},
                {"logit_bias": ((1, 1.0),)},
                {"allowed_token_ids": (1,)},
                {"bad_words_ids": ((1,),)},
            )
        ],
    ],
    ids=str,
)
def test_what_is_asked_of_the_sampler(asked: dict[str, Any], flags: int) -> None:
    """A flag that is missing would leave out the work in silence."""
    assert SamplingParams(**asked).flags == flags


def test_no_answer_is_for_scored_prompts_alone_and_needs_no_room() -> None:
    SamplingParams(max_tokens=0, prompt_logprobs=0).validate(LIMITS)
    assert resolve_max_tokens(100, 0, LIMITS) == 0
    with pytest.raises(InvalidRequest, match="101 tokens"):
        resolve_max_tokens(101, 0, LIMITS)
    with pytest.raises(InvalidRequest, match="100 tokens"):
        resolve_max_tokens(100, 1, LIMITS)

"""Tensor parallelism over NCCL: two GPUs give the answers of one, and an LLM on two of them can be closed."""

from __future__ import annotations

import json

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core import Grammar

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
PROMPTS = ["Hello", "a b c", "What is Minisgl?", "Write a word.", "1 2 3 4 5"] * 4


def tokens_of(tp_size: int, dtype: str, attention: str) -> list[list[int]]:
    """Greedy answers, every fifth in JSON; of an LLM that is closed afterwards."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, grammar=grammar if index % 5 == 3 else None)
        for index in range(len(PROMPTS))
    ]
    with LLM("demo", dtype, tp_size=tp_size, attention_backend=attention) as llm:
        answers = llm.generate(PROMPTS, params)
        llm.check_idle()
    return [answer["token_ids"] for answer in answers]


def test_two_gpus_answer_as_one_does() -> None:
    assert tokens_of(2, "float32", "torch") == tokens_of(1, "float32", "torch")


def test_two_gpus_answer_as_one_does_in_bfloat16_from_graphs() -> None:
    """But where the two likeliest tokens are nearly as likely, for sums are rounded in another order."""
    two, one = tokens_of(2, "bfloat16", "auto"), tokens_of(1, "bfloat16", "auto")
    same = sum(a == b for a, b in zip(two, one, strict=True))
    assert same >= len(PROMPTS) * 3 // 4

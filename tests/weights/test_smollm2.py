"""Trained weights, SmolLM2-135M-Instruct in float32: run with scripts/test-weights, which makes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from exact.oracle import LOGIT_MARGIN
from minisgl import LLM, SamplingParams
from minisgl.sampling_params import Grammar

pytestmark = pytest.mark.weights

PAGE = 16
NEW_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is 17 plus 25?",
    "la la la la la la la la la la la la la la la la",
    "Translate to German: good morning",
    "Explain gravity to a child.",
    "def fibonacci(n):",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes with bananas, oats and nothing else, in five short steps.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the folder of the weights; without them the tests fail, because they were asked for by name."""
    path = Path(os.environ.get("MINISGL_SMOLLM2", ""))
    assert (path / "config.json").is_file(), "MINISGL_SMOLLM2 names no model folder: run scripts/test-weights"
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", device="cpu", page_size=PAGE, num_page_override=512) as llm:
        yield llm


def test_ten_chats_are_answered_as_by_transformers(llm: LLM, folder: Path) -> None:
    """All at a time here, one by one there; a token is compared up to a near tie, which at most two chats may have."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [llm.tokenizer.encode_chat(chat, None, {}).tolist() for chat in chats]
    ours = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    whole = 0
    for prompt, answer in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        best = torch.stack(out.logits).squeeze(1).topk(2, dim=1).values
        clear = (best[:, 0] - best[:, 1] > LOGIT_MARGIN).tolist()
        length = clear.index(False) if False in clear else NEW_TOKENS
        whole += length == NEW_TOKENS
        assert answer["token_ids"][:length] == out.sequences[0, len(prompt) : len(prompt) + length].tolist()
    assert whole >= len(QUESTIONS) - 2


def test_an_answer_follows_its_schema(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Give me the name and age of a person as JSON."}]
    params = SamplingParams(temperature=0, max_tokens=100, grammar=Grammar("json_schema", json.dumps(SCHEMA)))
    (answer,) = llm.chat(chat, params)
    assert answer["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["text"]), SCHEMA)


def test_twenty_turns_find_all_that_was_said_in_the_cache(llm: LLM) -> None:
    """A turn's prompt begins with the last one's, of which all whole pages are found."""
    chat: list[dict[str, str]] = []
    known = 0
    for turn in range(20):
        chat.append({"role": "user", "content": f"Tell me a word that begins with {chr(ord('a') + turn)}."})
        prompt_len = len(llm.tokenizer.encode_chat(chat, None, {}))
        (answer,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=8))
        assert known // PAGE * PAGE <= answer["cached_tokens"] < prompt_len
        assert turn == 0 or answer["cached_tokens"] >= PAGE
        chat.append({"role": "assistant", "content": answer["text"]})
        known = prompt_len

"""Every field that a generating route takes reaches the engine as what it means, under each of its names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from api_harness import MODEL, RunningServer

from minisgl.config import SamplingDefaults
from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import TextOptions
from minisgl.message.to_tokenizer import Generate, IdsPrompt, TextPrompt
from minisgl.sampling_params import Grammar, SamplingParams

ROUTES = ["/v1/chat/completions", "/v1/completions", "/generate"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
VLLMS_OPTIONS = {  # every field that vLLM's clients write
    **dict.fromkeys(("json", "json_object", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern")),
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "disable_fallback": True,
}


def sent(server: RunningServer, path: str, **fields: Any) -> Generate:
    """Return what the engine gets for these fields."""
    before = len(server.engine.of_type(Generate))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", **fields}
    del body["messages" if "chat" not in path else "prompt"]
    response = server.post(path, json=body)
    assert response.status_code == 200, response.text
    generate = server.engine.wait_for(Generate, before + 1)[-1]
    assert isinstance(generate, Generate)
    return generate


SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 7}, {"max_tokens": 7}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"top_p": 0.5, "top_k": 40, "min_p": 0.1}, {"top_p": 0.5, "top_k": 40, "min_p": 0.1}),
    ({"seed": 5}, {"seed": 5}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stop_token_ids": [3, 4]}, {"stop_token_ids": (3, 4)}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"presence_penalty": -1.5}, {"presence_penalty": -1.5}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"logit_bias": {"5": -100, "007": 0.5}}, {"logit_bias": ((5, -100.0), (7, 0.5))}),
    ({"allowed_token_ids": [9, 8]}, {"allowed_token_ids": (9, 8)}),
    ({"bad_words": ["foo", " bar"]}, {"bad_words": ("foo", " bar")}),
    ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
    ({"prompt_logprobs": 20}, {"prompt_logprobs": 20}),
    # Structured output under all its names.
    ({"response_format": {"type": "json_object"}}, {"grammar": Grammar("json_object")}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"grammar": Grammar("json_schema", SCHEMA_TEXT)},
    ),
    ({"guided_json": SCHEMA}, {"grammar": Grammar("json_schema", SCHEMA_TEXT)}),
    ({"guided_json": SCHEMA_TEXT}, {"grammar": Grammar("json_schema", SCHEMA_TEXT)}),
    ({"json_schema": SCHEMA_TEXT}, {"grammar": Grammar("json_schema", SCHEMA_TEXT)}),
    ({"structured_outputs": {"json": SCHEMA}}, {"grammar": Grammar("json_schema", SCHEMA_TEXT)}),
    ({"structured_outputs": {"json_object": True}}, {"grammar": Grammar("json_object")}),
    ({"guided_regex": "a+"}, {"grammar": Grammar("regex", "a+")}),
    ({"regex": "a+"}, {"grammar": Grammar("regex", "a+")}),
    ({"structured_outputs": {"regex": "a+"}}, {"grammar": Grammar("regex", "a+")}),
    ({"structured_outputs": {**VLLMS_OPTIONS, "regex": "a+", "new": None}}, {"grammar": Grammar("regex", "a+")}),
    ({"guided_choice": ["a", 'b"']}, {"grammar": Grammar("choice", '["a","b\\""]')}),
    ({"structured_outputs": {"choice": ["a"]}}, {"grammar": Grammar("choice", '["a"]')}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": Grammar("ebnf", 'root ::= "a"')}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": Grammar("ebnf", 'root ::= "a"')}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": Grammar("lark", 'start: "a"')}),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "expected"), SAMPLING, ids=lambda value: str(value)[:60])
def test_sampling_fields_reach_the_scheduler(
    server: RunningServer, path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    plain = sent(server, path).sampling
    changed = sent(server, path, **fields).sampling
    names = SamplingParams.__struct_fields__
    assert {name: getattr(changed, name) for name in names} == {
        name: expected.get(name, getattr(plain, name)) for name in names
    }


@pytest.mark.parametrize("path", ROUTES)
def test_text_and_queue_fields_reach_the_tokenizer(server: RunningServer, path: str) -> None:
    plain = TextOptions(continues=path != ROUTES[0])  # completions continue the prompt's text; chats do not
    assert sent(server, path, skip_special_tokens=False).text == msgspec.structs.replace(
        plain, skip_special_tokens=False
    )
    stopped = msgspec.structs.replace(plain, stop=("x",), include_stop=True)
    assert sent(server, path, stop="x", include_stop_str_in_output=True).text == stopped
    assert sent(server, path, stop="x", no_stop_trim=True).text == stopped
    assert sent(server, path, truncate_prompt_tokens=5).truncate == 5
    assert sent(server, path, truncate_prompt_tokens=-1).truncate == -1
    assert sent(server, path).truncate is None
    assert sent(server, path, cache_salt="mine").cache_salt == "mine"
    assert sent(server, path, extra_key="mine").cache_salt == "mine"
    assert sent(server, path, priority=-3).priority == -3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({}, None),
    ],
)
def test_logprobs_of_chat(server: RunningServer, fields: dict[str, Any], expected: int | None) -> None:
    assert sent(server, ROUTES[0], **fields).sampling.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "logprobs", "of_prompt"),
    [
        ({"logprobs": 3}, 3, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 3, "echo": True}, 3, 3),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, 3, 5),
        ({"echo": True}, None, None),
        ({"echo": True, "max_tokens": 0}, None, 0),
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, 1, 1),
        ({"prompt_logprobs": 2, "max_tokens": 0}, None, 2),
        ({"best_of": 2}, 0, None),
        ({"best_of": 2, "logprobs": 4}, 4, None),
    ],
)
def test_logprobs_of_completions(
    server: RunningServer, fields: dict[str, Any], logprobs: int | None, of_prompt: int | None
) -> None:
    generate = sent(server, ROUTES[1], **fields)
    assert (generate.sampling.logprobs, generate.sampling.prompt_logprobs) == (logprobs, of_prompt)
    assert generate.echo == ("echo" in fields)
    assert len(generate.seq_ids) == fields.get("best_of", 1)


def test_special_tokens_of_completions(server: RunningServer) -> None:
    assert sent(server, ROUTES[1], add_special_tokens=False).prompt == TextPrompt("hi", add_special_tokens=False)
    assert sent(server, ROUTES[1], prompt=["hi"]).prompt == TextPrompt("hi", add_special_tokens=True)


def test_a_long_prompt_of_ids_that_is_cut(server: RunningServer) -> None:
    """The tokenizer worker cuts it, of what can be seen of it; without that it is refused."""
    ids = [1, 2] * 4096
    assert sent(server, ROUTES[1], prompt=ids, truncate_prompt_tokens=5).prompt == IdsPrompt(pack_ids(ids[-4096:]))
    refused = server.post(ROUTES[1], json={"prompt": ids}).json()["error"]
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded")


DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.05)


@pytest.fixture
def recommended(start_server: Callable[..., RunningServer]) -> RunningServer:
    """A server whose model recommends how to sample."""
    return start_server(sampling_defaults=DEFAULTS)


@pytest.mark.parametrize("path", ROUTES)
def test_the_models_defaults_stand_for_what_is_left_out(recommended: RunningServer, path: str) -> None:
    left_out = sent(recommended, path, temperature=None).sampling
    chosen = sent(recommended, path, temperature=0, top_p=1, repetition_penalty=1.0).sampling
    assert {name: getattr(left_out, name) for name in DEFAULTS.fields} == DEFAULTS.fields
    assert (chosen.temperature, chosen.top_p, chosen.repetition_penalty) == (0.0, 1.0, 1.0)
    assert (chosen.top_k, chosen.min_p) == (20, 0.01)


def test_defaults_of_the_model_override_defaults_of_sglang(recommended: RunningServer) -> None:
    before = len(recommended.engine.of_type(Generate))
    recommended.post("/generate", json={"text": "hi", "sampling_params": {"top_k": 7}})
    sampling = recommended.engine.wait_for(Generate, before + 1)[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 7, 128)

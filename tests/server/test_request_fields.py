"""Request fields for conversations, structured output and the queue take effect on a server of the built-in model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from minisgl.models.hub import demo_folder
from minisgl.tokenizer.text import TextTokenizer
from support.server import Server, wait_until
from support.small_models import save_long_demo

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CLIENT = httpx.Client(timeout=300)
QUESTION = {"role": "user", "content": "What is Minisgl?"}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_long_demo(tmp_path_factory.mktemp("models") / "demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a tiny model, perhaps on a busy machine
        with Server("--model", str(folder), "--max-running-requests", "1", "--max-queued-requests", "4") as server:
            yield server
            server.wait_idle()


def post(server: Server, route: str, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 8, "temperature": 0, **fields}
    body |= {} if {"messages", "prompt"} & body.keys() else {"messages": [QUESTION], "prompt": "What is"}
    return CLIENT.post(server.url + route, json={name: value for name, value in body.items() if name != _other(route)})


def _other(route: str) -> str:
    return "prompt" if route == CHAT else "messages"


def ask(server: Server, route: str = CHAT, **fields: Any) -> dict[str, Any]:
    response = post(server, route, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def prompt_ids(server: Server, **fields: Any) -> list[int]:
    """Return the ids of a conversation, as the model gets it."""
    ids: list[int] = ask(server, return_token_ids=True, max_tokens=1, **fields)["prompt_token_ids"]
    return ids


# --- structured output, under every name ---

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
EBNF, LARK = 'root ::= "x" [0-9] "y"', 'start: "x" /[0-9]/ "y"'
STRUCTURED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, "schema"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "schema"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "schema"),
    ({"guided_json": SCHEMA}, "schema"),
    ({"json_schema": json.dumps(SCHEMA)}, "schema"),
    ({"structured_outputs": {"json": SCHEMA}}, "schema"),
    ({"response_format": {"type": "json_object"}}, r"\{[\s\S]*"),
    ({"structured_outputs": {"json_object": True}}, r"\{[\s\S]*"),
    ({"guided_regex": "[xy]{3}"}, "[xy]{3}"),
    ({"regex": "[xy]{3}"}, "[xy]{3}"),
    ({"structured_outputs": {"regex": "[xy]{3}"}}, "[xy]{3}"),
    ({"guided_choice": ["ja", "nein"]}, "ja|nein"),
    ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"),
    ({"guided_grammar": EBNF}, "x[0-9]y"),
    ({"ebnf": EBNF}, "x[0-9]y"),
    ({"structured_outputs": {"grammar": LARK}}, "x[0-9]y"),
]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "expected"), STRUCTURED, ids=lambda value: str(value)[:40])
def test_structured_output(server: Server, route: str, fields: dict[str, Any], expected: str) -> None:
    answer = ask(server, route, max_tokens=24, **fields)
    if expected == "schema":
        assert json.loads(text_of(answer))["a"] in (1, 2)
    else:
        assert re.fullmatch(expected, text_of(answer))
    assert answer["choices"][0]["finish_reason"] == "stop" or "json_object" in str(fields)


def test_a_schema_that_says_nothing_of_other_keys_allows_none(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert json.loads(text_of(ask(server, max_tokens=24, guided_json=schema))) == {"a": 1}


def test_a_format_that_is_text_changes_nothing(server: Server) -> None:
    assert text_of(ask(server, response_format={"type": "text"})) == text_of(ask(server))


# --- conversations ---


def test_chat_fields_shape_the_prompt(server: Server) -> None:
    plain = prompt_ids(server)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "Minisgl?"}]
    lines = prompt_ids(server, messages=[{"role": "user", "content": "What is\nMinisgl?"}])
    assert prompt_ids(server, messages=[{"role": "user", "content": parts}]) == lines != plain
    unfinished = prompt_ids(server, add_generation_prompt=False)
    assert unfinished == plain[: len(unfinished)]
    assert len(unfinished) < len(plain)
    tools = [{"type": "function", "function": WEATHER}]
    shown = prompt_ids(server, tools=tools)
    assert len(shown) > len(plain) + len("get_weather")
    assert prompt_ids(server, functions=[WEATHER]) == shown
    assert prompt_ids(server, tools=tools, tool_choice="none") == plain
    thinking = {kind: prompt_ids(server, chat_template_kwargs={"enable_thinking": kind}) for kind in (True, False)}
    assert thinking[True] != thinking[False]
    assert prompt_ids(server, reasoning_effort="none") == thinking[False]
    for kind, reasoning in ((True, {"enabled": True}), (False, {"effort": "none"}), (True, {"effort": "low"})):
        assert prompt_ids(server, reasoning=reasoning) == thinking[kind]
    assert prompt_ids(server, reasoning_effort="none", reasoning={"enabled": True}) == thinking[False]
    begun = [QUESTION, {"role": "assistant", "content": "It is"}]
    continued = prompt_ids(server, messages=begun, continue_final_message=True)
    assert bytes(continued[-5:]) == b"It is"


def test_reasoning_fields_place_the_thought(server: Server) -> None:
    asked = {"reasoning_effort": "high", "max_tokens": 60}
    message = ask(server, **asked)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    hidden = ask(server, include_reasoning=False, **asked)["choices"][0]["message"]
    assert "reasoning" not in hidden
    assert hidden["content"] == message["content"]
    assert message["reasoning"] in text_of(ask(server, separate_reasoning=False, **asked))


def test_functions_are_called_in_the_old_format(server: Server) -> None:
    weather = [{"role": "user", "content": "Tell me the weather in Paris."}]
    choice = ask(server, messages=weather, functions=[WEATHER], max_tokens=100)["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


def test_limits_and_special_tokens(server: Server) -> None:
    answer = ask(server, max_tokens=9, max_completion_tokens=4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
    special = int(TextTokenizer.from_folder(demo_folder()).encode("<|im_start|>")[0])
    for route in (CHAT, COMPLETIONS):
        marks = {"allowed_token_ids": [special], "max_tokens": 2}
        assert text_of(ask(server, route, **marks)) == ""
        assert text_of(ask(server, route, skip_special_tokens=False, **marks)) == "<|im_start|>" * 2


def test_accounting_fields_have_no_effect(server: Server) -> None:
    nothing = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"}
    nothing |= {"prompt_cache_key": "k", "prediction": {"type": "content", "content": "x"}}
    for route in (CHAT, COMPLETIONS):
        assert text_of(ask(server, route, **nothing)) == text_of(ask(server, route))


# --- the queue: one request runs, three wait ---


@pytest.fixture
def in_background(server: Server) -> Iterator[Callable[..., list[httpx.Response]]]:
    """Sends a request from a thread; its response appears in the list."""
    threads = []

    def start(name: str, **fields: Any) -> list[httpx.Response]:
        answers: list[httpx.Response] = []
        body = {"prompt": "a", "temperature": 0, "ignore_eos": True, **fields}
        headers = {"x-request-id": name}

        def run() -> None:
            answers.append(httpx.post(server.url + COMPLETIONS, json=body, headers=headers, timeout=300))

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return answers

    yield start
    for thread in threads:
        thread.join()
    server.wait_idle()


def waiting(server: Server) -> int:
    return server.info()["scheduler-0"]["requests_waiting"]


def test_priority_and_an_abort_while_waiting(
    server: Server, in_background: Callable[..., list[httpx.Response]]
) -> None:
    running = in_background("running", max_tokens=30000)
    wait_until(lambda: server.info()["scheduler-0"]["requests_running"] == 1)
    later = in_background("later", max_tokens=30000)
    unwanted = in_background("unwanted", max_tokens=300)
    wait_until(lambda: waiting(server) == 2)
    sooner = in_background("sooner", max_tokens=2, priority=1)
    wait_until(lambda: waiting(server) == 3)
    full = post(server, COMPLETIONS)
    assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
    assert int(full.headers["retry-after"]) > 0
    assert full.headers.get("x-should-retry") != "false"
    assert CLIENT.get(f"{server.url}/ready").status_code == 503

    aborted = CLIENT.post(f"{server.url}/abort", json={"request_id": "unwanted"}).json()
    assert aborted == {"aborted": 1}
    wait_until(lambda: bool(unwanted))
    assert (unwanted[0].status_code, unwanted[0].json()["error"]["code"]) == (499, "request_aborted")
    assert not running, "a waiting request is aborted before its turn"
    assert CLIENT.post(f"{server.url}/abort", json={"request_id": "running"}).json() == {"aborted": 1}
    wait_until(lambda: bool(sooner))
    assert sooner[0].status_code == 200
    assert not later
    assert CLIENT.post(f"{server.url}/abort", json={"request_id": "later"}).json() == {"aborted": 1}
    wait_until(lambda: bool(later))
    assert (later[0].status_code, later[0].json()["error"]["code"]) == (499, "request_aborted")

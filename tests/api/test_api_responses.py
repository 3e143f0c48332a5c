"""/v1/responses: what the engine gets, and how its answer comes back, as the openai SDK reads it with all its types."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from api_harness import MODEL, RunningServer
from pydantic import BaseModel

from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import Abort, TextOptions
from minisgl.message.to_api import OutputDelta, OutputDeltas
from minisgl.message.to_tokenizer import ChatPrompt, Encode, Generate
from minisgl.parsers.streaming import CallArguments, CallStart, Content, Reasoning
from minisgl.sampling_params import SamplingParams
from minisgl.server.api.requests.open_request import Job
from minisgl.server.api.responses.job import truncate_to_fit
from minisgl.server.api.responses.output import Output

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": None, "strict": False}
THOUGHT = ["<think>", "Hm", "m.", "</think>"]
CALL = ["<tool_call>\n", '{"name": "get_weather", ', '"arguments": {"city": ', '"Paris"}', "}\n</tool_call>"]
WEATHER_SERVER: dict[str, Any] = {"type": "namespace", "name": "mcp__weather", "description": "x", "tools": [WEATHER]}
SHOWN_WEATHER = "mcp__weather__get_weather"  # the name that the model knows
TIME_CALL = ["\n<tool_call>\n", '{"name": "get_time", "arguments": {}}\n', "</tool_call>"]


@pytest.fixture(scope="module")
def strict() -> openai.OpenAI:
    """A client that refuses answers and events which are not as OpenAI's types say."""
    options: Any = {"_strict_response_validation": True}
    return openai.OpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=120, **options)


@pytest.fixture
def hermes(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3")


def client_of(strict: openai.OpenAI, server: RunningServer) -> openai.OpenAI:
    return strict.with_options(base_url=f"{server.url}/v1")


def say(*texts: str, **fields: Any) -> dict[str, Any]:
    """A request that the engine answers with these tokens."""
    return {"model": MODEL, "input": f"say {json.dumps(texts)}", **fields}


def answer(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def sent(server: RunningServer, **fields: Any) -> Generate:
    """Return what the engine gets for this body."""
    before = len(server.engine.of_type(Generate))
    answer(server, **{"input": "Hi", **fields})
    generate = server.engine.wait_for(Generate, before + 1)[-1]
    assert isinstance(generate, Generate)
    return generate


def messages(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    prompt = sent(server, **fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def refusal(server: RunningServer, **fields: Any) -> tuple[str, str]:
    """Return the field that is named as wrong, and the message."""
    response = server.post(PATH, json={"input": "Hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def events(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    response = server.post(PATH, json={**fields, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return read_events(response.text)


def read_events(stream: str) -> list[dict[str, Any]]:
    """Return a stream's events, which are numbered, named by their type and not followed by [DONE]."""
    found = []
    for block in stream.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_numbers(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return output items without what differs from response to response."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


def test_an_answer_is_openais_object(server: RunningServer, strict: openai.OpenAI) -> None:
    response = client_of(strict, server).responses.create(
        **say("Hello", " there"), instructions="Be kind.", metadata={"job": "1"}, user="me", temperature=0.5, top_p=0.9
    )
    assert (response.output_text, response.status, response.error) == ("Hello there", "completed", None)
    assert (response.model, response.metadata, response.user) == (MODEL, {"job": "1"}, "me")
    assert (response.instructions, response.temperature, response.top_p) == ("Be kind.", 0.5, 0.9)
    assert (response.created_at, response.completed_at) > (1_700_000_000, response.created_at - 1)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (4, 2, 6)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (1, 0)
    assert response.to_dict()["store"] is False  # type: ignore[comparison-overlap]


def test_a_stream_tells_each_change_in_order(hermes: RunningServer, strict: openai.OpenAI) -> None:
    body = say(*THOUGHT, "I ", "look.", *CALL, *TIME_CALL, tools=[WEATHER, TIME])
    found = events(hermes, **body)
    kinds = [event["type"].removeprefix("response.") for event in found]
    once = [kind for index, kind in enumerate(kinds) if not (kind.endswith(".delta") and kinds[index - 1] == kind)]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        *(name.format("reasoning_text") for name in part),
        "output_item.done",
        "output_item.added",
        *(name.format("output_text") for name in part),
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    deltas = {
        kind: "".join(event["delta"] for event in found if event["type"] == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    arguments = '{"city": "Paris"}'
    assert deltas == {
        "reasoning_text": "Hmm.",
        "output_text": "I look.",
        "function_call_arguments": arguments + "{}",
    }
    final = found[-1]["response"]
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == final["output"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    for event in found:
        if "item_id" in event:
            assert event["item_id"] == final["output"][event["output_index"]]["id"]
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    whole = answer(hermes, **body)
    assert without_numbers(whole["output"]) == without_numbers(final["output"])

    with client_of(strict, hermes).responses.stream(**body) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in calls] == [("get_weather", arguments), ("get_time", "{}")]
    assert response.output_text == "I look."
    hermes.assert_idle()


def test_a_limit_leaves_the_response_incomplete(server: RunningServer) -> None:
    body = say("Hel", "lo", " there", max_output_tokens=2)
    for response in (answer(server, **body), events(server, **body)[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        (item,) = response["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello")
        assert response["completed_at"] is None
    assert events(server, **body)[-1]["type"] == "response.incomplete"


def test_a_call_within_which_the_answer_ends_is_incomplete(hermes: RunningServer) -> None:
    for texts, status in ((CALL, "completed"), (CALL[:4], "completed"), (CALL[:3], "incomplete")):
        body = say(*texts, tools=[WEATHER])
        for response in (answer(hermes, **body), events(hermes, **body)[-1]["response"]):
            (call,) = response["output"]
            assert (response["status"], call["type"], call["status"]) == ("completed", "function_call", status)


def test_an_answer_of_nothing_is_an_empty_message(hermes: RunningServer) -> None:
    assert [item["type"] for item in answer(hermes, **say())["output"]] == ["message"]
    assert [item["type"] for item in answer(hermes, **say(*THOUGHT))["output"]] == ["reasoning", "message"]


def test_a_failed_request_ends_its_stream_as_failed(server: RunningServer) -> None:
    with server.stream(PATH, json={"input": "hold", "stream": True}) as response:
        (generate,) = server.engine.wait_for(Generate)
        server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([1]), "some text")]))
        pieces = response.iter_text()
        begun = ""
        while "some text" not in begun:
            begun += next(pieces)
        server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], b"", "", "error")]))
        last = read_events(begun + "".join(pieces))[-1]
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
    assert server.post(PATH, json={"input": "fail"}).status_code == 500


def test_refusals_of_the_tokenizer_use_the_clients_field_names(server: RunningServer) -> None:
    for stream in (False, True):
        field, message = refusal(server, input="refuse", max_output_tokens=9, stream=stream)
        assert field == "max_output_tokens"
        assert message.startswith("max_output_tokens is too large")


def test_the_tokens_of_a_prompt_are_counted_as_its_response_counts_them(
    server: RunningServer, strict: openai.OpenAI
) -> None:
    client, asked = client_of(strict, server), {"model": MODEL, "input": "hello there", "instructions": "Be brief."}
    counted = client.responses.input_tokens.count(**asked)
    (question,) = server.engine.of_type(Encode)
    response = client.responses.create(**asked, max_output_tokens=2)
    (generate,) = server.engine.of_type(Generate)
    assert question.prompt == generate.prompt
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens > 0
    for word, status, field in (("refuse", 400, "input"), ("broken", 500, None)):
        refused = server.post(f"{PATH}/input_tokens", json={"input": word})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, field)


ITEMS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("Hi", [{"role": "user", "content": "Hi"}]),
    ([{"role": "developer", "content": "D"}, {"type": "message", "role": "user", "content": "U"}], [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "U"},
    ]),
    ([{"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]}], [
        {"role": "user", "content": "a\nb"},
    ]),
    (
        [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "get_time", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
            {"type": "function_call", "call_id": "c3", "name": "get_time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c3", "output": "one"},
        ],
        [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "T",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
                    {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": '{"a": 1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "noon"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c3", "content": "one"},
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("items", "expected"), ITEMS)
def test_items_become_the_messages_of_a_chat(server: RunningServer, items: Any, expected: list[dict[str, Any]]) -> None:
    assert messages(server, input=items) == expected
    system = {"role": "system", "content": "Be kind."}
    assert messages(server, input=items, instructions="Be kind.") == [system, *expected]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "nobody", "content": "x"}, "input.1.role"),
        ({"role": "user", "content": 5}, "input.1.content"),
        ({"role": "user"}, "input.1.content"),
        ({"content": "x"}, "input.1.type"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input.1.content.0.type"),
        ({"type": "computer_call", "id": "x"}, "input.1.type"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input.1.call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input.1.arguments"),
        ({"type": "function_call_output", "call_id": "c", "output": 5}, "input.1.output"),
        ({"type": "reasoning", "content": "x", "encrypted_content": 5}, "input.1.encrypted_content"),
        ({"type": "item_reference", "id": 5}, "input.1.id"),
        ({"role": "user", "content": "x", "id": {}}, "input.1.id"),
    ],
)
def test_a_wrong_item_is_refused_by_its_path(server: RunningServer, item: dict[str, Any], field: str) -> None:
    named, message = refusal(server, input=[{"role": "user", "content": "x"}, item])
    assert named == field
    assert message.startswith(field)


def test_no_items_or_too_many_are_refused(server: RunningServer) -> None:
    for absent in ([], None):
        assert refusal(server, input=absent) == ("input", "input must have at least one item")
    assert "8192" in refusal(server, input=[{"role": "user", "content": "x"}] * 8193)[1]


def test_a_thought_comes_back_sealed_or_in_the_open(hermes: RunningServer) -> None:
    response = answer(hermes, **say(*THOUGHT, "Yes.", include=["reasoning.encrypted_content"]))
    thought, message = response["output"]
    assert thought["summary"] == []
    sealed = {**thought, "content": None}
    assert thought["encrypted_content"]
    foreign = {**sealed, "encrypted_content": base64.b64encode(b"x").decode()}
    for item, expected in (
        (thought, {"reasoning_content": "Hmm."}),
        (sealed, {"reasoning_content": "Hmm."}),
        (foreign, {}),
    ):
        items = [{"role": "user", "content": "?"}, item, message, {"role": "user", "content": "again"}]
        assert messages(hermes, input=items)[1] == {"role": "assistant", "content": "Yes.", **expected}
        assert messages(hermes, input=items[:3])[1] == {"role": "assistant", "content": "Yes.", **expected}
    assert answer(hermes, **say(*THOUGHT, "Yes."))["output"][0]["encrypted_content"] is None


def test_log_probabilities_are_those_of_the_text(hermes: RunningServer) -> None:
    body = say(*THOUGHT, "Ye", "s.", *CALL, tools=[WEATHER], include=["message.output_text.logprobs"], top_logprobs=2)
    whole = answer(hermes, **body)["output"][1]["content"][0]["logprobs"]
    assert [token["token"] for token in whole] == ["Ye", "s."]
    assert all(len(token["top_logprobs"]) == 2 for token in whole)
    streamed = events(hermes, **body)
    deltas = [event["logprobs"] for event in streamed if event["type"] == "response.output_text.delta"]
    assert [token for logprobs in deltas for token in logprobs] == whole
    assert answer(hermes, **say("Yes."))["output"][0]["content"][0]["logprobs"] == []


def test_functions_and_choices_are_those_of_a_chat(hermes: RunningServer) -> None:
    chat = hermes.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}],
            "tool_choice": "required",
        },
    )
    assert chat.status_code == 200
    (expected,) = hermes.engine.of_type(Generate)
    tools = [WEATHER, {"type": "web_search"}, {"type": "custom", "name": "patch"}]
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", {"type": "allowed_tools", "mode": "required", "tools": [named, {"type": "mcp"}]}):
        generate = sent(hermes, tools=tools, tool_choice=choice)
        assert (generate.prompt, generate.sampling) == (expected.prompt, expected.sampling)
    assert sent(hermes, tools=tools, tool_choice=named).sampling.grammar is not None
    assert sent(hermes, tools=tools, tool_choice="none").prompt.tools is None
    assert sent(hermes, tools=tools[1:]).prompt.tools is None
    response = answer(hermes, **say("x", tools=tools))
    assert response["tools"] == tools
    assert [warning.split(":")[0] for warning in response["warnings"]] == ["tools.1", "tools.2"]
    assert "warnings" not in answer(hermes, **say("x", tools=[WEATHER]))
    one = answer(hermes, **say(*CALL, *TIME_CALL, tools=[WEATHER, TIME], parallel_tool_calls=False))
    assert [item["type"] for item in one["output"]] == ["function_call"]


def test_functions_of_a_namespace_have_one_name_for_the_model_and_two_for_the_client(
    hermes: RunningServer, strict: openai.OpenAI
) -> None:
    """Codex sends the tools of MCP servers so."""
    names = {"name": "get_weather", "namespace": "mcp__weather"}
    said = [text.replace("get_weather", SHOWN_WEATHER) for text in CALL]
    request = say(*said, *TIME_CALL, tools=[WEATHER_SERVER, TIME])
    items = answer(hermes, **request)["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == [tuple(names.values()), ("get_time", None)]
    streamed = events(hermes, **request)
    ended = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert [(item["name"], item.get("namespace")) for item in ended] == [tuple(names.values()), ("get_time", None)]
    done = [event["name"] for event in streamed if event["type"] == "response.function_call_arguments.done"]
    assert done == ["get_weather", "get_time"]
    typed = client_of(strict, hermes).responses.create(**request).output[0]
    assert (typed.type, typed.namespace) == ("function_call", "mcp__weather")

    result = {"type": "function_call_output", "call_id": items[0]["call_id"], "output": "rain"}
    generate = sent(hermes, tools=[WEATHER_SERVER, TIME], input=[items[0], result])
    (call,) = generate.prompt.messages[0]["tool_calls"]
    assert call["function"]["name"] == SHOWN_WEATHER
    assert [tool["function"]["name"] for tool in generate.prompt.tools] == [SHOWN_WEATHER, "get_time"]
    plain = [{**WEATHER, "name": SHOWN_WEATHER}]
    expected = sent(hermes, tools=plain, tool_choice={"type": "function", "name": SHOWN_WEATHER})
    chosen = sent(hermes, tools=[WEATHER_SERVER], tool_choice={"type": "function", **names})
    assert (chosen.prompt, chosen.sampling) == (expected.prompt, expected.sampling)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", **names}]}
    shown = sent(hermes, tools=[WEATHER_SERVER, TIME], tool_choice=allowed).prompt.tools
    assert [tool["function"]["name"] for tool in shown] == [SHOWN_WEATHER]
    mixed = {**WEATHER_SERVER, "tools": [{"type": "custom", "name": "patch"}, WEATHER]}
    (warning,) = answer(hermes, **say("x", tools=[mixed]))["warnings"]
    assert warning.startswith("tools.0.tools.0: ")


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([WEATHER], {"type": "web_search"}, "tool_choice.type"),
        ([WEATHER], {"type": "custom", "name": "patch"}, "tool_choice.type"),
        ([WEATHER], {"type": "function", "name": "nothing"}, "tool_choice.name"),
        ([WEATHER], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}, "tool_choice.tools"),
        ([WEATHER], {"type": "allowed_tools", "mode": "often", "tools": []}, "tool_choice.mode"),
        ([WEATHER], "often", "tool_choice"),
        ([{"type": "web_search"}], "required", "tool_choice"),
        ([], "required", "tool_choice"),
        ([{"type": "function"}], "auto", "tools.0.name"),
        ([{"type": "function", "name": "f", "parameters": {"type": "string"}}], "auto", "tools.0.parameters.type"),
        ([{"name": "f"}], "auto", "tools.0.type"),
        ([WEATHER_SERVER], {"type": "function", "name": "get_weather"}, "tool_choice.name"),
        ([{"type": "namespace", "tools": []}], "auto", "tools.0.name"),
        ([{**WEATHER_SERVER, "name": "a b"}], "auto", "tools.0.name"),
        ([{"type": "namespace", "name": "", "tools": []}], "auto", "tools.0.name"),
        ([{**WEATHER_SERVER, "name": "n" * 250}], "auto", "tools.0.tools.0.name"),
        ([{"type": "namespace", "name": "n"}], "auto", "tools.0.tools"),
        ([{"type": "namespace", "name": "n", "tools": ["f"]}], "auto", "tools.0.tools.0"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "auto", "tools.0.tools.0.name"),
        ([{**WEATHER_SERVER, "tools": [{**WEATHER, "name": ""}]}], "auto", "tools.0.tools.0.name"),
        ([WEATHER_SERVER, WEATHER_SERVER], "auto", "tools"),
        ([WEATHER_SERVER, {"type": "function", "name": SHOWN_WEATHER}], "auto", "tools"),
    ],
)
def test_a_wrong_tool_or_choice_is_refused(server: RunningServer, tools: Any, choice: Any, field: str) -> None:
    assert refusal(server, tools=tools, tool_choice=choice)[0] == field


class Person(BaseModel):
    name: str


def test_the_text_has_the_form_that_is_asked_for(server: RunningServer, strict: openai.OpenAI) -> None:
    parsed = client_of(strict, server).responses.parse(**say('{"name": ', '"Ann"}'), text_format=Person)
    assert parsed.output_parsed == Person(name="Ann")
    (generate,) = server.engine.of_type(Generate)
    assert generate.sampling.grammar.kind == "json_schema"
    assert json.loads(generate.sampling.grammar.text)["properties"] == {"name": {"title": "Name", "type": "string"}}
    text = {"format": {"type": "json_object"}, "verbosity": "low"}
    assert sent(server, text=text).prompt.template_kwargs == {"verbosity": "low"}  # type: ignore[union-attr]
    assert sent(server, text=text).sampling.grammar.kind == "json_object"  # type: ignore[union-attr]
    assert answer(server, input="Hi", text=text)["text"] == text
    assert refusal(server, text={"format": {"type": "json_schema", "name": "x"}})[0] == "text.format.schema"
    assert refusal(server, text=text, response_format={"type": "json_object"})[0] == "text.format"


def test_effort_and_sampling_reach_the_engine(server: RunningServer) -> None:
    generate = sent(server, reasoning={"effort": "low", "summary": "auto"}, top_k=7, max_output_tokens=3, seed=5)
    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.template_kwargs["reasoning_effort"] == "low"
    assert (generate.sampling.top_k, generate.sampling.max_tokens) == (7, 3)
    include = ["message.output_text.logprobs"]
    for fields, logprobs in (({}, None), ({"include": include}, 0), ({"include": include, "top_logprobs": 2}, 2)):
        assert sent(server, **fields).sampling.logprobs == logprobs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    ],
)
def test_unsupported_fields_are_refused_by_name(server: RunningServer, fields: dict[str, Any], field: str) -> None:
    named, message = refusal(server, **fields)
    assert named == field
    assert ("--response-store" in message) == (field in ("previous_response_id", "input.0"))


def test_without_a_store_no_response_is_found(server: RunningServer) -> None:
    id = answer(server, input="Hi")["id"]
    for response in (
        server.get(f"{PATH}/{id}"),
        server.get(f"{PATH}/{id}/input_items"),
        server.post(f"{PATH}/{id}/cancel"),
    ):
        assert response.status_code == 404
        assert "--response-store" in response.json()["error"]["message"]


def test_a_response_is_cancelled_while_it_is_answered(server: RunningServer, strict: openai.OpenAI) -> None:
    client = client_of(strict, server)
    with client.responses.create(model=MODEL, input="endless", stream=True) as stream:
        created = next(stream)
        assert created.type == "response.created"
        assert any(event.type == "response.output_text.delta" for event in stream)
        cancelled = client.responses.cancel(created.response.id)
        *_, last = stream
    assert (cancelled.status, cancelled.id) == ("cancelled", created.response.id)
    assert cancelled.output_text
    assert last.type == "response.failed"
    assert last.response.status == "cancelled"
    assert server.engine.wait_for(Abort)


def test_no_text_is_missing_from_a_response_between_two_of_its_events() -> None:
    """It may be cancelled while a thread writes them."""
    output, number = Output("1", itertools.count().__next__, {}, seals_reasoning=False), 0
    for event in (Reasoning("a"), Content("b"), CallStart(0, "c", "d"), CallArguments(0, "e"), Content("f")):
        number += not isinstance(event, CallArguments)
        for _ in output.take(event, []):
            assert len(output.items()) in (number - 1, number)
    for _ in output.finish("completed"):
        assert len(output.items()) == number == 4


def conversation(*messages: str) -> Job:
    """A chat whose messages have their role's first letter and as many tokens as characters."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    written = [{"role": roles[text[0]], "content": text} for text in messages]
    return Job(SamplingParams(max_tokens=2), TextOptions(), prompts=[ChatPrompt(written)])


@pytest.mark.parametrize(
    ("context", "left"),
    [(100, "sss uuu aaa uuu aaa tt aa uu"), (22, "sss uuu aaa tt aa uu"), (21, "sss uuu aaa tt aa uu"), (8, "sss uu")],
)
def test_the_oldest_turns_make_room(context: int, left: str) -> None:
    texts = "sss uuu aaa uuu aaa tt aa uu".split()
    asked = []

    async def count(prompt: ChatPrompt) -> int:
        asked.append(prompt)
        return sum(len(message["content"]) for message in prompt.messages)

    job, missing = asyncio.run(truncate_to_fit(conversation(*texts), count, context))
    (prompt,) = job.prompts
    assert isinstance(prompt, ChatPrompt)
    assert [message["content"] for message in prompt.messages] == left.split()
    assert missing == len(texts) - len(left.split())
    assert len(asked) <= 3


def test_a_turn_that_is_too_long_alone_is_left_to_be_refused() -> None:
    async def count(prompt: ChatPrompt) -> int | None:
        return None

    job = conversation("sss", "uuu", "aaa", "uuu")
    assert asyncio.run(truncate_to_fit(job, count, 5)) == (job, 0)

"""Tool calls and thoughts of the demo model through the real server, as the openai package sees them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from openai import OpenAI

from demo_model.case import Case, format_tool_call
from demo_model.skills import make_case
from support.server import Server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store") / "responses.db"
    with Server("--model", "demo", "--dtype", "float32", "--page-size", "8", "--response-store", str(store)) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client


def cases(skill: str, count: int, keep: Callable[[Case], bool] = bool) -> list[Case]:
    """The first unseen cases that a test is about."""
    found = (make_case(skill, 7000 + number, context=300) for number in itertools.count())
    return list(itertools.islice(filter(keep, found), count))


def params(case: Case, **changes: Any) -> dict[str, Any]:
    wanted: dict[str, Any] = {"model": "demo", "messages": list(case.messages), "temperature": 0}
    wanted["max_tokens"] = case.max_tokens
    if case.tools:
        wanted["tools"] = list(case.tools)
    if case.chat_template_kwargs:
        wanted["extra_body"] = {"chat_template_kwargs": case.chat_template_kwargs}
    return wanted | changes


def calls(case: Case) -> bool:
    return case.skill == "tools" and case.answer.startswith("<tool_call>")


def test_a_tool_call_and_what_it_returned(client: OpenAI) -> None:
    """The whole round: the model calls, the tool answers, the model tells. In one piece and streamed."""
    right = told = 0
    for case in cases("tools", 4, calls):
        whole = client.chat.completions.create(**params(case))
        message, finish = whole.choices[0].message, whole.choices[0].finish_reason
        with client.chat.completions.stream(**params(case)) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == finish
        assert (final.message.content or None) == message.content
        assert [call.function.model_dump() for call in message.tool_calls or []] == [
            {"name": call.function.name, "arguments": call.function.arguments}
            for call in final.message.tool_calls or []
        ]
        if not message.tool_calls:
            continue
        call = message.tool_calls[0]
        assert (finish, message.content) == ("tool_calls", None)
        right += format_tool_call(call.function.name, json.loads(call.function.arguments)) == case.answer
        result = {"role": "tool", "tool_call_id": call.id, "content": "4711"}
        answer = client.chat.completions.create(**params(case, messages=[*case.messages, message, result]))
        assert answer.choices[0].finish_reason == "stop"
        told += answer.choices[0].message.content == "The result is: 4711"
    assert right >= 3
    assert told >= 3


def test_tools_made_by_zod(client: OpenAI) -> None:
    """Tools come as from the npm package ai. The `$schema` in front sent the demo model into endless output."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": schema}
    choice = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        temperature=0,
        max_tokens=200,
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "get_weather"  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == {"city": "Oslo"}  # type: ignore[union-attr]


PLAIN_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>

</think>

"""


@pytest.fixture(scope="module")
def without_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a chat template that knows no tools."""
    template = tmp_path_factory.mktemp("template") / "plain.jinja"
    template.write_text(PLAIN_TEMPLATE)
    with Server("--model", "demo", "--chat-template", str(template)) as server:
        yield server
        server.wait_idle()


def test_a_demanded_call_of_a_model_whose_template_knows_no_tools(without_tools: Server) -> None:
    """Enforced in plain JSON, with arguments that follow the schema; with auto the tools are ignored, and logged."""
    names = ("book_flight", "book_train")
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Kyoto"]}, "window": {"type": "boolean"}},
        "required": ["city", "window"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Get me to Kyoto."}],
        "tools": [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names],
        "max_tokens": 200,
    }
    named = {"type": "function", "function": {"name": "book_train"}}
    for choice, finish in (("required", "tool_calls"), (named, "stop")):
        for seed in range(3):
            wanted = {**asked, "tool_choice": choice, "temperature": 1.5, "seed": seed}
            whole = without_tools.client.chat.completions.create(**wanted).choices[0]
            with without_tools.client.chat.completions.stream(**wanted) as stream:
                streamed = stream.get_final_completion().choices[0]
            assert whole.finish_reason == streamed.finish_reason == finish
            assert not whole.message.content
            (call,), (same,) = whole.message.tool_calls or [], streamed.message.tool_calls or []
            assert call.function.name in (names if choice == "required" else names[1:])
            jsonschema.validate(json.loads(call.function.arguments), schema)
            assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
    for _ in range(2):
        free = without_tools.client.chat.completions.create(**asked, temperature=0).choices[0].message
        assert free.content
        assert not free.tool_calls

    def logged() -> list[str]:
        return [line for line in without_tools.log if "tools with tool_choice auto are ignored" in line]

    wait_until(lambda: bool(logged()))
    assert len(logged()) == 1


def test_thought_and_answer(client: OpenAI) -> None:
    right = 0
    for case in cases("thinking", 4, lambda case: case.thinks and not case.answer.startswith("<tool_call>")):
        whole = client.chat.completions.create(**params(case))
        message = whole.choices[0].message
        thought = (message.model_extra or {})["reasoning_content"]
        right += (thought, message.content) == (case.thought, case.answer)
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        # A token is a byte here, a marker is one too; line breaks are around each.
        tokens = len(f"<think>\n{thought}\n</think>".encode()) - len("<think></think>") + 2
        assert whole.usage.completion_tokens_details.reasoning_tokens == tokens
        streamed = {"reasoning": "", "content": ""}
        for chunk in client.chat.completions.create(**params(case), stream=True):
            delta = chunk.choices[0].delta
            streamed["content"] += delta.content or ""
            streamed["reasoning"] += (delta.model_extra or {}).get("reasoning", "")
        assert streamed == {"reasoning": thought, "content": message.content}
    assert right >= 3


def test_a_thought_before_a_call(client: OpenAI) -> None:
    right = 0
    for case in cases("thinking", 3, lambda case: case.thinks and case.answer.startswith("<tool_call>")):
        message = client.chat.completions.create(**params(case)).choices[0].message
        found = [format_tool_call(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
        right += ((message.model_extra or {}).get("reasoning"), found) == (case.thought, [case.answer])
    assert right >= 2


def test_thinking_is_switched_by_the_effort(client: OpenAI) -> None:
    (case,) = cases("recall", 1, lambda case: not case.chat_template_kwargs)
    for effort, thinks in (("high", True), ("none", False)):
        message = (
            client.chat.completions.create(**params(case, reasoning_effort=effort, max_tokens=200)).choices[0].message
        )
        assert ("reasoning" in (message.model_extra or {})) is thinks
        assert message.content


def test_an_answer_is_continued(client: OpenAI) -> None:
    """A cut answer continues from the cut to the same end."""
    for case in cases("recall", 3, lambda case: len(case.answer) > 12):
        whole = client.chat.completions.create(**params(case)).choices[0].message.content or ""
        begun = [*case.messages, {"role": "assistant", "content": whole[:8]}]
        extra = {"continue_final_message": True}
        rest = client.chat.completions.create(**params(case, messages=begun, extra_body=extra)).choices[0].message
        assert rest.content == whole[8:]
        echoed = params(case, messages=begun, extra_body=extra | {"echo": True})
        assert client.chat.completions.create(**echoed).choices[0].message.content == whole


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    """Greedy: the chosen token is the first of the alternatives, and the texts together are the answer."""
    (case,) = cases("recall", 1)
    whole = client.chat.completions.create(**params(case), logprobs=True, top_logprobs=3).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode().startswith(whole.message.content or "")
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert 0 >= entry.logprob >= entry.top_logprobs[1].logprob
    streamed = []
    for chunk in client.chat.completions.create(**params(case), logprobs=True, top_logprobs=3, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_a_call_is_demanded(client: OpenAI) -> None:
    """tool_choice demands it, with and without a thought before it; the arguments follow the tool's schema."""
    weather = {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    }
    tools = [
        {"type": "function", "function": weather},
        {"type": "function", "function": {"name": "now", "parameters": {"additionalProperties": False}}},
    ]
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, finish in (("required", "tool_calls"), (named, "stop")):
        for effort in ("none", "high"):
            found = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
                tools=tools,  # type: ignore[arg-type]
                tool_choice=choice,  # type: ignore[arg-type]
                reasoning_effort=effort,  # type: ignore[arg-type]
                parallel_tool_calls=False,
                temperature=0,
                max_tokens=400,
            ).choices[0]
            (call,) = found.message.tool_calls or []
            assert (found.finish_reason, found.message.content) == (finish, None)
            assert ("reasoning" in (found.message.model_extra or {})) is (effort == "high")
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                assert arguments.keys() == {"city", "unit"}
                assert arguments["unit"] in ("C", "F")
            assert choice == "required" or call.function.name == "get_weather"


def test_a_thought_before_an_answer_of_a_schema(client: OpenAI) -> None:
    """The constraint holds for the answer alone: thinking is as free as ever."""

    class Answer(pydantic.BaseModel):
        colour: Literal["red", "green"]

    (case,) = cases("thinking", 1, lambda case: case.thinks and not case.tools)
    message = client.chat.completions.parse(**params(case, max_tokens=300), response_format=Answer).choices[0].message
    assert (message.model_extra or {})["reasoning"] == case.thought
    assert isinstance(message.parsed, Answer)


def test_a_call_is_demanded_where_the_model_would_not_call(client: OpenAI) -> None:
    (case,) = cases("recall", 1)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"additionalProperties": False}}}]
    free = client.chat.completions.create(**params(case, tools=tools)).choices[0]
    assert not free.message.tool_calls
    limit = {"max_tokens": 200, "parallel_tool_calls": False}
    demanded = client.chat.completions.create(**params(case, tools=tools, tool_choice="required", **limit)).choices[0]
    (call,) = demanded.message.tool_calls or []
    assert call.function.name == "now"


def test_content_of_a_schema_or_a_call(client: OpenAI) -> None:
    """Given both, the model calls where a tool fits and answers in the schema's form where none does."""
    (case,) = cases("tools", 1, calls)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    found = client.chat.completions.create(**params(case, response_format=form)).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.tool_calls
    (other,) = cases("recall", 1)
    tools = list(case.tools or ())
    answer = client.chat.completions.create(**params(other, response_format=form, tools=tools, max_tokens=200)).choices[
        0
    ]
    assert answer.message.tool_calls or isinstance(json.loads(answer.message.content or "")["n"], int)


def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(client: OpenAI) -> None:
    """The model is free to call, at a temperature at which it would often call wrongly."""
    number = {"type": "integer", "minimum": 1000, "maximum": 1099}
    called = spoke = 0
    for case in [*cases("tools", 2, calls), *cases("recall", 1)]:
        tools = []
        for tool in case.tools or cases("tools", 1, calls)[0].tools or ():
            names = list(tool["function"]["parameters"]["properties"])
            schema = {"type": "object", "properties": dict.fromkeys(names, number), "required": names}
            schema["additionalProperties"] = False
            function = {**tool["function"], "parameters": schema, "strict": True}
            tools.append({"type": "function", "function": function})
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        wanted = params(case, tools=tools, temperature=1.2, n=3, seed=3, max_tokens=120)
        for choice in client.chat.completions.create(**wanted).choices:
            spoke += not choice.message.tool_calls
            for call in choice.message.tool_calls or []:
                if choice.finish_reason == "tool_calls":
                    called += 1
                    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    assert called >= 3
    assert spoke >= 1


def response_params(case: Case, **changes: Any) -> dict[str, Any]:
    """A case as /v1/responses takes it."""
    wanted = {"model": "demo", "input": list(case.messages), "temperature": 0, "max_output_tokens": case.max_tokens}
    if case.tools:
        wanted["tools"] = [{"type": "function", **tool["function"]} for tool in case.tools]
    if case.chat_template_kwargs:
        wanted["extra_body"] = {"chat_template_kwargs": case.chat_template_kwargs}
    return wanted | changes


def test_a_response_calls_a_tool_and_another_tells_what_it_returned(client: OpenAI) -> None:
    """Agents send the items back, or the id of the response that is kept."""
    told = 0
    for case in cases("tools", 2, calls):
        with client.responses.stream(**response_params(case)) as stream:
            first = stream.get_final_response()
        assert first.status == "completed"
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "4711"}
            for item in first.output
            if item.type == "function_call"
        ]
        sent_back = [*case.messages, *(item.to_dict() for item in first.output), *results]
        stateless = client.responses.create(**response_params(case, input=sent_back))
        kept = client.responses.create(**response_params(case, input=results, previous_response_id=first.id))
        assert stateless.output_text == kept.output_text
        told += kept.output_text == "The result is: 4711"
    assert told


def test_a_response_thinks_and_answers(client: OpenAI) -> None:
    (case,) = cases("thinking", 1, lambda case: case.thinks and not case.answer.startswith("<tool_call>"))
    response = client.responses.create(**response_params(case))
    thought, message = response.output
    assert thought.type == "reasoning"
    assert message.type == "message"
    assert [part.text for part in thought.content or []] == [case.thought]
    assert (response.output_text, thought.summary) == (case.answer, [])
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > len(case.thought)


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_a_response_is_parsed_into_a_type(client: OpenAI) -> None:
    response = client.responses.parse(model="demo", input="Ann is 41 years old.", temperature=0, text_format=Person)
    assert response.output_parsed == Person(name="Ann", age=41)

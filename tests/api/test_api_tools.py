"""Tools in a chat: what the engine gets, and how calls come back, streamed and not, as the openai SDK reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from api_harness import MODEL, RunningServer
from api_sse import parse_events

from minisgl.message.to_tokenizer import ChatPrompt, Generate
from minisgl.parsers.streaming import CallStart
from minisgl.server.api.answers.parsed_choice import ChatOptions, ParsedChoice
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.requests.open_request import Delta

PATH = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
CALL = [
    "<tool_call>",
    "\n",
    '{"name": "get_weather", ',
    '"arguments": {"ci',
    'ty": "Pa',
    'ris"}',
    "}\n",
    "</tool_call>",
]
TIME_CALL = ["\n<tool_call>\n", '{"name": "get_time", "arguments": {}}\n', "</tool_call>"]


@pytest.fixture
def hermes(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3")


def say(*texts: str, **fields: Any) -> dict[str, Any]:
    """A request that the engine answers with these tokens."""
    message = {"role": "user", "content": f"say {json.dumps(texts)}"}
    return {"model": MODEL, "messages": [message], "tools": [WEATHER, TIME], **fields}


def answer(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(PATH, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def sent(server: RunningServer, body: dict[str, Any]) -> Generate:
    """Return what the engine gets for this body."""
    before = len(server.engine.of_type(Generate))
    answer(server, body)
    generate = server.engine.wait_for(Generate, before + 1)[-1]
    assert isinstance(generate, Generate)
    return generate


def refusal(server: RunningServer, body: dict[str, Any]) -> str:
    """The field that is named as wrong."""
    response = server.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["param"])


def test_a_call_is_openais_object(hermes: RunningServer) -> None:
    choice = answer(hermes, say("I look.", "\n", *CALL))
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert answer(hermes, say(*CALL))["message"]["content"] is None


def test_a_call_is_streamed_as_openai_does(hermes: RunningServer) -> None:
    chunks = parse_events(hermes.post(PATH, json=say("I look.", *CALL, *TIME_CALL, stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [delta["content"] for delta in deltas if "content" in delta] == ["", "I look."]
    first, *rest = [call for call in calls if call["index"] == 0]
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
    assert rest  # the number of fragments depends on how fast the client reads
    assert "".join(call["function"]["arguments"] for call in rest) == '{"city": "Paris"}'
    second = [call for call in calls if call["index"] == 1]
    assert second[0]["function"]["name"] == "get_time"
    assert second[0]["id"] != first
    hermes.assert_idle()


def test_the_sdk_puts_a_streamed_call_together(hermes: RunningServer) -> None:
    body = say("I look.", *CALL, *TIME_CALL)
    with hermes.sdk.chat.completions.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
        ("get_weather", '{"city": "Paris"}'),
        ("get_time", "{}"),
    ]
    assert (message.content, final.choices[0].finish_reason) == ("I look.", "tool_calls")
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["get_weather", "get_time"]


def test_without_tools_nothing_is_a_call(hermes: RunningServer) -> None:
    text = "".join(CALL)
    for change in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = answer(hermes, say(*CALL, **change))
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_without_a_form_of_calls_tools_are_ignored_and_the_log_says_so_once(
    start_server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(tool_call_parser="none")
    for choice in ("none", "required"):
        answer(server, say("x", tool_choice=choice))
    assert "tool" not in caplog.text
    for _ in range(2):
        assert answer(server, say(*CALL))["message"]["content"] == "".join(CALL)
    (line,) = [line for line in caplog.messages if "tool" in line]
    assert line.startswith("tools with tool_choice auto are ignored")


def test_without_a_form_of_calls_a_demanded_one_is_plain_json(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(tool_call_parser="none")
    call = ('{"name": "get_', 'time", "parameters": ', '{"zone"', ': "UTC"}}')
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice, finish in (("required", "tool_calls"), (named, "stop")):
        generate = sent(server, say(*call, tool_choice=choice))
        assert generate.sampling.grammar is not None
        assert r"{\"name\": \"get_time\", \"parameters\": " in generate.sampling.grammar.text
        written = answer(server, say(*call, tool_choice=choice))
        assert written["finish_reason"] == finish
        assert written["message"]["content"] is None
        (made,) = written["message"]["tool_calls"]
        assert made["function"] == {"name": "get_time", "arguments": '{"zone": "UTC"}'}


def test_finish_reasons(hermes: RunningServer) -> None:
    """Never tool_calls without one."""
    assert answer(hermes, say("No tool", " fits."))["finish_reason"] == "stop"
    assert answer(hermes, say("<tool_call>", "oh"))["finish_reason"] == "stop"
    cut = answer(hermes, say(*CALL, max_tokens=5))
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pa'
    assert answer(hermes, say(*CALL, tool_choice="required"))["finish_reason"] == "tool_calls"
    named = answer(hermes, say(*CALL, tool_choice={"type": "function", "function": {"name": "get_weather"}}))
    assert named["finish_reason"] == "stop"
    assert named["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_a_call_that_is_cut_is_not_announced(hermes: RunningServer) -> None:
    """A stop string may end the answer within a call, and so may the model. Without its end marker a call is whole."""
    for length in range(len(CALL) + 1):
        body = say(*TIME_CALL, *CALL[:length])
        choice = answer(hermes, body)
        calls = choice["message"]["tool_calls"]
        is_cut = len(calls) == 2 and calls[1]["function"]["arguments"] != '{"city": "Paris"}'
        assert choice["finish_reason"] == ("stop" if is_cut else "tool_calls"), length
        chunks = parse_events(hermes.post(PATH, json=body | {"stream": True}).text)
        assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert is_cut == (length in (4, 5)), calls


def test_parallel_tool_calls(hermes: RunningServer) -> None:
    body = say(*CALL, *TIME_CALL, "\nDone.")
    both = answer(hermes, body)["message"]
    assert [call["function"]["name"] for call in both["tool_calls"]] == ["get_weather", "get_time"]
    one = answer(hermes, body | {"parallel_tool_calls": False})["message"]
    assert [call["function"]["name"] for call in one["tool_calls"]] == ["get_weather"]
    assert one["content"] == both["content"] == "\nDone."
    chunks = parse_events(hermes.post(PATH, json=body | {"parallel_tool_calls": False, "stream": True}).text)
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0}


def test_asking_whether_a_call_is_wanted_counts_none() -> None:
    choice = ParsedChoice(ChatOptions(body=ChatBody(messages=[]), model=MODEL, parser=lambda _: None), "")
    end = Delta(0)
    end.finish = "stop"
    assert choice._is_wanted(CallStart(0, "id", "get_time"))
    assert choice._is_wanted(CallStart(1, "id", "get_time"))
    assert choice.finish_reason(end) == "stop"


def test_choices_have_calls_of_their_own(hermes: RunningServer) -> None:
    whole = hermes.sdk.chat.completions.create(**say(*CALL, n=3))
    ids = {choice.message.tool_calls[0].id for choice in whole.choices if choice.message.tool_calls}
    assert len(ids) == 3
    chunks = parse_events(hermes.post(PATH, json=say(*CALL, n=3, stream=True)).text)
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        calls = [call for choice in mine for call in choice["delta"].get("tool_calls", ())]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'


@pytest.mark.parametrize(
    ("parser", "text", "arguments", "id_length"),
    [
        ("qwen3_coder", "<function=get_weather><parameter=city>5</parameter></function>", '{"city": "5"}', 29),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "5"}}', '{"city": "5"}', 29),
        ("pythonic", "[get_weather(city='5')]", '{"city": "5"}', 29),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "5"}', '{"city": "5"}', 9),
    ],
)  # fmt: skip
def test_other_forms(
    start_server: Callable[..., RunningServer], parser: str, text: str, arguments: str, id_length: int
) -> None:
    server = start_server(tool_call_parser=parser)
    (call,) = answer(server, say(*text))["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": arguments}
    assert len(call["id"]) == id_length


def test_markers_stay_in_the_text_when_they_are_needed(hermes: RunningServer) -> None:
    thought = ("<think>", "</think>")
    assert sent(hermes, say("x")).text.keep == (*thought, "<tool_call>", "</tool_call>")
    assert sent(hermes, say("x", tools=None)).text.keep == thought
    assert sent(hermes, say("x", separate_reasoning=False, tool_choice="none")).text.keep == ()


# What the engine gets.


def test_tools_that_the_model_is_shown(hermes: RunningServer) -> None:
    def shown(**fields: Any) -> Any:
        prompt = sent(hermes, say("x", **fields)).prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt.tools

    assert shown() == shown(tool_choice="auto") == shown(tool_choice="required") == [WEATHER, TIME]
    assert shown(tool_choice={"type": "function", "function": {"name": "get_time"}}) == [WEATHER, TIME]
    assert shown(tool_choice="none") is None
    only = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    assert shown(tool_choice={"type": "allowed_tools", "allowed_tools": only}) == [TIME]


def test_calls_are_demanded_by_a_grammar(hermes: RunningServer) -> None:
    def grammar(**fields: Any) -> str:
        found = sent(hermes, say("x", **fields)).sampling.grammar
        return "" if found is None else f"{found.kind} {found.text}"

    assert grammar() == grammar(tool_choice="auto") == grammar(tool_choice="none") == ""
    required = grammar(tool_choice="required")
    assert required.startswith("template ")
    assert "get_weather" in required
    assert "get_time" in required
    named = grammar(tool_choice={"type": "function", "function": {"name": "get_time"}})
    assert "get_time" in named
    assert "get_weather" not in named
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    only = grammar(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert "get_weather" in only
    assert "get_time" not in only
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": "Answer"}}}
    either = grammar(response_format=schema)
    assert "Answer" in either
    assert "get_weather" in either
    assert "Answer" not in grammar(response_format=schema, tool_choice="required")
    assert "template" not in grammar(response_format=schema, tool_choice="none")


def test_calls_of_strict_tools_are_constrained(hermes: RunningServer) -> None:
    def grammar(*tools: dict[str, Any], **fields: Any) -> str:
        found = sent(hermes, say("x", **{"tools": list(tools), **fields})).sampling.grammar
        return "" if found is None else found.text

    schema = {"type": "object", "properties": {"zone": {"title": "Zone"}}, "title": "Times"}
    time = {"type": "function", "function": {"name": "get_time", "parameters": schema, "strict": True}}
    free = grammar(WEATHER, time)
    assert "TEXT" in free
    assert "Times" in free
    assert "city" in free, "the name of a parameter"
    assert "required" not in free, "the tool is not strict"
    assert grammar(WEATHER, {**time, "function": {**time["function"], "strict": False}}) == ""
    assert grammar(WEATHER, time, tool_choice="none") == ""
    assert "TEXT" not in grammar(WEATHER, time, tool_choice="required")
    only = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    assert grammar(WEATHER, time, tool_choice={"type": "allowed_tools", "allowed_tools": only}) == ""
    assert free != grammar(WEATHER, time, parallel_tool_calls=False)


def test_a_form_that_cannot_hold_to_a_schema(start_server: Callable[..., RunningServer]) -> None:
    """Strings are plain text in this one."""
    server = start_server(tool_call_parser="qwen3_coder")
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}}}
    function = {"name": "find", "parameters": schema}
    for choice in ("auto", "required"):
        strict = {"type": "function", "function": {**function, "strict": True}}
        response = server.post(PATH, json=say("x", tools=[strict], tool_choice=choice))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert "'code'" in response.json()["error"]["message"]
        assert answer(server, say("x", tools=[{"type": "function", "function": function}], tool_choice=choice))


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic"])
def test_no_schema_of_a_tool_is_an_internal_error_or_more_than_its_limit(
    start_server: Callable[..., RunningServer], parser: str
) -> None:
    """Schemas that branch at each level hung the process, circular ones were a 500, copied ones took gigabytes."""
    server = start_server(tool_call_parser=parser)
    twice = {level: {"anyOf": [{"$ref": f"#/$defs/{level}"}] * 2} for level in ("a", "b", *range(40))}
    circular = {"a": twice["b"], "b": twice["a"]}
    branching = {"a": twice[0]} | {str(level): twice[level + 1] for level in range(39)} | {"39": {"type": "string"}}
    large = {"a": {"type": "integer", "description": "x" * 600_000}}
    for definitions, status in ((circular, 200), (branching, 200), (large, 400)):
        properties = {f"p{number}": {"$ref": "#/$defs/a"} for number in range(1000 if status == 400 else 1)}
        schema = {"type": "object", "properties": properties, "$defs": definitions}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        response = server.post(PATH, json=say("x", tools=tools, tool_choice="required"))
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"]["param"] == "tools"
            assert "262144" in response.json()["error"]["message"]


NAMED = {"type": "function", "function": {"name": "nothing"}}
BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER, {"type": "function", "function": {"name": "a b"}}]}, "tools.1.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 257}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools.0.function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools.0.function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools.0.function.parameters.type",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]},
        "tools.0.function.parameters.properties",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 1}}}}]},
        "tools.0.function.parameters.properties.a",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}]},
        "tools.0.function.parameters.required",
    ),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [TIME]}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [TIME, NAMED]}}},
        "tool_choice.allowed_tools.tools.1.function.name",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("change", "param"), BAD_TOOLS)
def test_bad_tools(server: RunningServer, change: dict[str, Any], param: str) -> None:
    assert refusal(server, say("x", **change)) == param


def call_with(**changes: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}} | changes
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


BAD_CALLS: list[tuple[list[dict[str, Any]], str]] = [
    (call_with(id=5), "messages.1.tool_calls.0.id"),
    (call_with(type="custom"), "messages.1.tool_calls.0.type"),
    (call_with(function=None), "messages.1.tool_calls.0.function"),
    (call_with(function={"arguments": "{}"}), "messages.1.tool_calls.0.function.name"),
    (call_with(function={"name": "f", "arguments": 5}), "messages.1.tool_calls.0.function.arguments"),
    ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages.0.tool_calls"),
    ([{"role": "assistant", "tool_calls": ["f"]}], "messages.0.tool_calls.0"),
    ([{"role": "assistant", "tool_calls": []}], "messages.0.content"),
    ([{"role": "assistant", "content": "x", "audio": {"id": "1"}}], "messages.0.audio"),
    ([{"role": "assistant", "content": "x", "reasoning_content": 5}], "messages.0.reasoning_content"),
    ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages.0.tool_call_id"),
    ([{"role": "user", "content": "x", "name": 5}], "messages.0.name"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_CALLS)
def test_bad_messages(server: RunningServer, messages: list[dict[str, Any]], param: str) -> None:
    assert refusal(server, {"model": MODEL, "messages": messages}) == param


def test_messages_of_a_conversation_with_calls(server: RunningServer) -> None:
    """An assistant's words come back as they left: with null content, reasoning under either name, empty lists."""
    messages = [
        {"role": "user", "content": "x"},
        call_with(function={"name": "f"})[1],
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "assistant", "content": None, "refusal": "I will not.", "tool_calls": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "x"},
    ]
    prompt = sent(server, {"model": MODEL, "messages": messages}).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1:-1] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "content": "", "reasoning": "hm"},
        {"role": "assistant", "content": "I will not.", "refusal": "I will not."},
        {"role": "assistant", "content": "No."},
    ]


CUSTOM = {"type": "custom", "custom": {"name": "patch"}}


def test_tools_that_are_no_functions_are_passed_over_and_the_log_says_so_once(
    hermes: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [CUSTOM, WEATHER, {"type": "web_search"}]
    for _ in range(2):
        found = sent(hermes, say("Hi", tools=tools)).prompt
        assert isinstance(found, ChatPrompt)
        assert found.tools == [WEATHER]
    lines = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert sorted("'custom'" in line for line in lines) == [False, True]
    demand = {"type": "custom", "custom": {"name": "patch"}}
    assert refusal(hermes, say("Hi", tools=tools, tool_choice=demand)) == "tool_choice"
    assert refusal(hermes, say("Hi", tools=[CUSTOM], tool_choice="required")) == "tool_choice"
    assert answer(hermes, say("Hi", tools=[CUSTOM]))["message"]["content"] == "Hi"


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_calls_of_its_own(hermes: RunningServer, stream: bool) -> None:
    response = hermes.post(PATH, json=say(*CALL, *TIME_CALL, n=2, stream=stream))
    if stream:
        deltas = [chunk["choices"][0] for chunk in parse_events(response.text)]
        calls = [
            (choice["index"], call["index"], call["id"])
            for choice in deltas
            for call in choice["delta"].get("tool_calls", [])
            if "id" in call
        ]
    else:
        calls = [
            (choice["index"], index, call["id"])
            for choice in response.json()["choices"]
            for index, call in enumerate(choice["message"]["tool_calls"])
        ]
    assert sorted(place[:2] for place in calls) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({call_id for _, _, call_id in calls}) == 4

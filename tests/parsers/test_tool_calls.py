"""Tool calls in every form: read right, however the text is cut, and nothing that is none is lost."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import Parsed, cut, run

from minisgl.parsers.harmony import HarmonyParser
from minisgl.parsers.parser_choice import TOOL_CALL_PARSERS
from minisgl.parsers.reasoning import REASONING_FORMATS, Place, ReasoningParser
from minisgl.parsers.streaming import CallArguments, CallStart, Content
from minisgl.parsers.tool_calls import ToolCallParser

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    "2nd/get-page": {"type": "object"},
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "warm": {"type": "boolean"},
            "limit": {"type": "number"},
            "tags": {"type": "array"},
            "more": {"type": "object"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
}


def parser(name: str) -> ToolCallParser:
    ids = itertools.count()
    return TOOL_CALL_PARSERS[name](TOOLS, lambda: f"id{next(ids)}")


def parse(name: str, text: str) -> Parsed:
    """Parse the text in one piece, and check that character by character gives the same."""
    whole = run(parser(name), [text])
    assert run(parser(name), list(text)) == whole
    return whole


CITY = ("get_weather", '{"city": "Paris"}')
# form, text, content, calls
GOOD: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [CITY]),
    (
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "f"}</tool_call>\n',
        "I look.",
        [CITY, ("f", '{"a": [1, {"b": "}"}]}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "", [("f", '{"a":1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\n\\"a\\": 1}"}</tool_call>', "", [("f", '{\n"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>ok', "ok", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}', "", [("f", '{"s": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),  # no last brace
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "", [("f", '{"a": 1,}')]),  # unchanged
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "ab', "", [("f", '{"s": "ab')]),  # cut by a limit
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\"}"}}', "", [("f", '{"s": "\\"}"}')]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    (
        "hermes",  # a broken call does not hide the next
        '<tool_call>{"name": "f", "arg</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arg</tool_call>',
        [("f", "{}")],
    ),
    (
        "hermes",  # nor does one that has no end
        '<tool_call>{"arguments": {"a": "1}</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": "1}</tool_call>',
        [("f", "{}")],
    ),
    (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork \"<b>\"\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=warm>\nTrue\n</parameter>\n<parameter=limit>\n1.50\n</parameter>\n"
        "<parameter=tags>\n[\"a\", 'b']\n</parameter>\n<parameter=more>\n{\"é\": null}\n</parameter>\n"
        "<parameter=unit>\nnull\n</parameter>\n</function>\n</tool_call>\n",
        "Sure.",
        [
            (
                "get_weather",
                '{"city": "New\\nYork \\"<b>\\"", "days": 3, "warm": true, "limit": 1.5, '
                '"tags": ["a", "b"], "more": {"é": null}, "unit": null}',
            )
        ],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
    ("qwen3_coder", "<function=f>\n<parameter=a>1</parameter></function>", "", [("f", '{"a": 1}')]),  # no outer tags
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter></tool_call>", "", [("f", '{"a": "x"}')]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=new>\nx\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"new": "x"}'), ("get_weather", '{"unit": "C"}')],
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>\nab\n</par", "", [("f", '{"s": "ab\\n</par')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\n12", "", [("f", '{"a": 12')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=>x", "<parameter=>x", [("f", "{}")]),
    ("qwen3_coder", "<tool_call><function=f>oh</function>", "oh</function>", [("f", "{}")]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [CITY]),
    ("llama3_json", '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "f", "arguments": {}}\n{"name": "f"}',
        "",
        [("f", '{"a": 1}'), ("f", "{}"), ("f", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}; and more', "; and more", [("f", "{}")]),
    ("pythonic", "[get_weather(city='Paris')]", "", [CITY]),
    ("pythonic", " [f(a=1, s=\"x)('\\\"\"), f()] ", "", [("f", '{"a": 1, "s": "x)(\'\\""}'), ("f", "{}")]),
    ("pythonic", "<|python_start|>[f(a=-1, s=[None, true, {'k': (1, 2.5)}])]<|python_end|>", "", [
        ("f", '{"a": -1, "s": [null, true, {"k": [1, 2.5]}]}'),
    ]),
    ("pythonic", "[2nd/get-page(from=1, x-y = 'a,b=c', a={'z': \"]\", 'y': 2},)]", "", [
        ("2nd/get-page", '{"from": 1, "x-y": "a,b=c", "a": {"z": "]", "y": 2}}'),
    ]),
    ("pythonic", "[f(  # (1)\n a=1,\n # two\n s='x' 'y' # 3\n)]", "", [("f", '{"a": 1, "s": "xy"}')]),
    ("pythonic", "[f(a=1), f(a=g())]", ", f(a=g())]", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [CITY]),
    ("mistral", 'Ok. [TOOL_CALLS][{"name": "f"}, {"name": "f", "arguments": {"a": 1}, "id": "123456789"}]', "Ok.", [
        ("f", "{}"), ("f", '{"a": 1}'),
    ]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [
        ("f", '{"a": 1}'), CITY,
    ]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": {"b": "{"}}', "", [("f", '{"a": {"b": "{"}}')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "\\"}"}', "", [("f", '{"s": "\\"}"}')]),
    ("mistral", '[TOOL_CALLS]f {"a": 1} done', " done", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, 7]', ", 7]", [("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_calls_and_the_content_around_them(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    parsed = parse(form, text)
    assert (parsed.content, parsed.calls) == (content, calls)
    assert parsed.ids == [f"id{index}" for index in range(len(calls))]


# What is no call is content to the last character.
PLAIN: list[tuple[str, str]] = [
    ("hermes", "<tool_call> of what?"),
    ("hermes", 'a <tool_call>{"name": 7, "arguments": {}}</tool_call>\n'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"'),
    ("hermes", "<tool_call>[1]</tool_call> <tool_cal"),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("qwen3_coder", "<tool_call>\n{}</tool_call>"),
    ("qwen3_coder", "<function=>x <function=a\nb> <function=f"),
    ("qwen3_coder", "<tool_call>\n<func"),
    ("qwen3_coder", "<tool_call> a > b"),
    ("llama3_json", '{"name": "Ann", "parameters": {}}'),  # JSON, but no tool of ours
    ("llama3_json", '{"answer": 1}'),
    ("llama3_json", 'Call {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[1, 2] [f()]"),
    ("pythonic", "[g(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(**x)]"),
    ("pythonic", "[f(**{'a': 'b=1'})]"),
    ("pythonic", "[f(a=)]"),
    ("pythonic", "[f(a=1,, s='x')]"),
    ("pythonic", "[f(,)]"),
    ("pythonic", "[f(a==1)]"),
    ("pythonic", '[f(a=1 #"\n) + (2 #"\n)]'),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a={1, 2})]"),
    ("pythonic", "[f(a=x)]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ("pythonic", "[f(a=" + "9" * 5000 + ")]"),
    ("pythonic", "<|python_start|>x"),
    ("mistral", "[TOOL_CALLS] are what I make"),
    ("mistral", "[TOOL_CALLS] [1]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]1[AR"),
    ("mistral", "[TOOL_CALLS]" + "x" * 500 + "{}"),
    ("mistral", " \n [TOOL_C"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), PLAIN)
def test_text_that_is_no_call_is_content(form: str, text: str) -> None:
    assert parse(form, text) == Parsed(content=text)


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name": "f"', "<tool", "_call>"],
    "qwen3_coder": [
        "<tool_call>", "<function=f>", "<function=", "<parameter=a>", "<parameter=s>", "<parameter=", "</parameter>",
        "</function>", "</tool_call>", "12", "<par", ">",
    ],
    "llama3_json": ['{"name": "f", "parameters": ', '{"name": ', '"f"', "<|python_tag|>", ";", "<|python"],
    "pythonic": ["[", "f(", "a=", ")", ", ", "]", "'x", "<|python_start|>", "<|python_end|>", "1", "{'a': 1}", "\\"],
    "mistral": ["[TOOL_CALLS]", "f", "[ARGS]", "[CALL_ID]", "[", "]", ",", '{"name": "f", "arguments": ', "[TOOL"],
}  # fmt: skip
JSON = ['{"a": 1}', "{", "}", '"', "\\", ":", "[", "]", ",", '"s": ', "1", "null", " ", "\n", "x", "é😀"]


@pytest.mark.parametrize("form", FRAGMENTS)
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_cut_gives_the_same(form: str, data: st.DataObject) -> None:
    fragments = st.sampled_from(FRAGMENTS[form] * 2 + JSON)
    text = "".join(data.draw(st.lists(fragments, max_size=14)))
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=12))
    whole = run(parser(form), [text])
    assert run(parser(form), cut(text, cuts)) == whole
    assert run(parser(form), list(text)) == whole
    if not whole.calls:
        assert whole.content == text


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["f", "get_weather"]),
            st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=4)),
        ),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(0, 500), max_size=12),
    st.booleans(),
)
def test_arguments_survive(calls: list[tuple[str, dict[str, Any]]], cuts: list[int], ascii_only: bool) -> None:
    """Whatever the values, they come back as they were, in each of the forms that write JSON or Python."""
    texts = [json.dumps(arguments, ensure_ascii=ascii_only) for _, arguments in calls]
    expected = [(name, text) for (name, _), text in zip(calls, texts, strict=True)]
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in expected]
    written = {
        "hermes": "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "mistral_named": "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in expected),
    }
    for form, text in written.items():
        parsed = run(parser(form.removesuffix("_named")), cut(text, cuts))
        assert parsed.content == ""
        assert parsed.calls == expected
    python = f"[{', '.join(f'{name}(x={arguments!r})' for name, arguments in calls)}]"
    parsed = run(parser("pythonic"), cut(python, cuts))
    assert parsed.content == ""
    assert parsed.calls == [(name, json.dumps({"x": one}, ensure_ascii=False)) for name, one in calls]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (None, '{"a": 1}', '{"a": 1}'),
        ({"description": "anything"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "array"}, "['é', 1]", ["é", 1]),
        ({"type": ["integer", "boolean"]}, "é", "é"),  # no value of these types
        ({"enum": [1, 2.5, "a", None]}, "2.5", 2.5),
        ({"const": True}, "True", True),
        ({"type": "integer", "anyOf": [{"minimum": 1}, {"maximum": -1}]}, "5", 5),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "{'a': 1}", {"a": 1}),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/A"}], "default": 1}, "5", 5),
        ({"allOf": [{"type": "object"}, {"minProperties": 1}]}, '{"a": 1}', {"a": 1}),
        ({"$ref": "https://example.com/object"}, '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_in_plain_text_is_what_its_schema_says(schema: Any, text: str, value: Any) -> None:
    properties = {} if schema is None else {"x": schema}
    tool = {"type": "object", "properties": properties, "$defs": {"A": {"type": "integer"}}}
    call = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    (_, arguments), *_ = run(TOOL_CALL_PARSERS["qwen3_coder"]({"f": tool}, lambda: "id"), [call]).calls
    assert arguments == json.dumps({"x": value}, ensure_ascii=False)


@pytest.mark.parametrize("form", FRAGMENTS)
@settings(max_examples=50, deadline=None)
@given(st.text(), st.lists(st.integers(0, 100), max_size=8))
def test_plain_text_is_not_held_back(form: str, text: str, cuts: list[int]) -> None:
    """After every piece, only white space or the beginning of a marker is still to come."""
    reader = parser(form)
    shown = fed = ""
    for piece in cut(f"x{text}", cuts):
        fed += piece
        for event in reader.feed(piece):
            assert isinstance(event, Content)
            shown += event.text
        rest = fed.removeprefix(shown).lstrip()
        assert any(marker.startswith(rest) for marker in reader.markers)


def test_a_call_is_streamed() -> None:
    """The name is sent when the arguments begin, and the arguments as they come."""
    reader = parser("hermes")
    assert reader.feed('<tool_call>{"name": "f", "arguments"') == []
    assert reader.feed(': {"s"') == [CallStart(0, "id0", "f"), CallArguments(0, '{"s"')]
    assert reader.feed(': "a b') == [CallArguments(0, ': "a b')]
    assert reader.feed('c"}') == [CallArguments(0, 'c"}')]
    assert reader.feed("}</tool_call>") == []
    coder = parser("qwen3_coder")
    assert coder.feed("<tool_call><function=f>") == [CallStart(0, "id0", "f")]
    assert coder.feed("<parameter=s>") == [CallArguments(0, '{"s": ')]
    assert coder.feed("\nlong") == [CallArguments(0, '"'), CallArguments(0, "long")]
    assert coder.feed(' "text"') == [CallArguments(0, ' \\"text\\"')]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": '),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
        ("llama3_json", '{"name": "f", "parameters": {"a": '),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": '),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '),
        ("pythonic", "[f(a="),
        ("reasoning", "<think>why"),
        ("harmony", "<|channel|>analysis<|message|>why"),
    ],
)
def test_parsers_are_freed_without_the_garbage_collector(form: str, text: str) -> None:
    """Otherwise they keep the schemas of an answered request's tools, which may take megabytes."""
    if form == "reasoning":
        one: Any = ReasoningParser(REASONING_FORMATS["qwen3"], Place.UNDECIDED)
    else:
        one = HarmonyParser(TOOLS, lambda: "id") if form == "harmony" else parser(form)
    freed = weakref.ref(one)
    gc.disable()
    try:
        one.feed(text)
        del one
        assert freed() is None
    finally:
        gc.enable()


def test_python_does_not_warn_of_what_a_model_writes() -> None:
    """From Python 3.12 on, each path such as C:\\data was a line on stderr, past the log that never waits."""
    program = r"""
from minisgl.parsers.parser_choice import TOOL_CALL_PARSERS
from minisgl.parsers.plain_values import typed
(_, arguments, *_) = TOOL_CALL_PARSERS["pythonic"]({"f": {}}, lambda: "id").feed(r"[f(x='C:\data')]")
print(arguments.text, typed(r"['C:\data']", frozenset({"array"})))
"""
    ended = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ('{"x": "C:\\\\data"} ["C:\\\\data"]\n', "")


def test_long_texts_take_linear_time() -> None:
    """A megabyte in small pieces, in the states that hold text back or follow it."""
    long = "ab" * 200_000
    for form, begin, end in [
        ("hermes", '<tool_call>{"arguments": {"s": "', '"}, "name": "f"}'),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>", "</parameter></function>"),
        ("pythonic", "[f(s='", "')]"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "', '"}'),
    ]:
        pieces = [begin, *(long[at : at + 20] for at in range(0, len(long), 20)), end]
        parsed = run(parser(form), pieces)
        assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == [("f", {"s": long})]

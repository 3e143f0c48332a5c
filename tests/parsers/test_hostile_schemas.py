"""Tool schemas that are made to be expensive: what is done with them in the API process has bounds."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from parsing import run

from minisgl.parsers.parser_choice import TOOL_CALL_PARSERS
from minisgl.parsers.plain_values import ALL_TYPES, MAX_ALTERNATIVES, Allowance, is_exact, texts_of, types_of
from minisgl.parsers.pythonic import MAX_CODE_CHARS, PythonicParser
from minisgl.parsers.qwen_coder import QwenCoderParser
from minisgl.sampling_params import MAX_GRAMMAR_CHARS, InvalidRequest
from minisgl.structured_output.tool_grammar import FORMS, calls_grammar, check_strict, free_grammar

BY_PARAMETER = ("pythonic", "qwen3_coder")
Schema = dict[str, Any]


def branching(depth: int, end: Schema) -> Schema:
    """Each definition refers to the next one twice: 2**depth ways lead to the end."""
    definitions: Schema = {f"a{level}": {"anyOf": [ref(f"a{level + 1}")] * 2} for level in range(depth)}
    return tool({"x": ref("a0")}, {**definitions, f"a{depth}": end})


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def tool(properties: Schema, definitions: Schema) -> Schema:
    return {"type": "object", "properties": properties, "$defs": definitions}


CIRCULAR = tool({"x": ref("a")}, {"a": {"anyOf": [ref("a"), ref("b")]}, "b": {"anyOf": [ref("a")]}})
CHAIN = tool({"x": ref("a0")}, {f"a{i}": ref(f"a{i + 1}") for i in range(5000)} | {"a5000": {"type": "integer"}})


def test_a_schema_that_branches_at_every_level_is_walked_once() -> None:
    begin = time.process_time()
    for depth in (20, 60):
        enum = branching(depth, {"enum": ["a", "b", None]})
        x = enum["properties"]["x"]
        assert types_of(x, enum, Allowance()) == {"string", "null"}
        assert texts_of(x, enum, Allowance()) == ["a", "b", "null"]
        assert is_exact(x, enum, Allowance())
        assert is_exact(x, branching(depth, {"type": "string"}), Allowance())
        for form in FORMS:
            calls_grammar(form, {"f": enum}, parallel=True)
            free_grammar(form, {"f": enum}, parallel=True)
            check_strict(form, {"f": enum}, {"f"})
        assert arguments(enum, "null") == {"x": None}
    assert time.process_time() - begin < 2


def arguments(schema: Schema, value: str) -> Any:
    """Value of the parameter x as Qwen3-Coder's parser reads it."""
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    ((_, read),) = run(QwenCoderParser({"f": schema}, lambda: "id"), [text]).calls
    return json.loads(read)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schema", [CIRCULAR, CHAIN], ids=["circular", "chain"])
def test_circular_and_deep_schemas_are_no_internal_error(form: str, schema: Schema) -> None:
    calls_grammar(form, {"f": schema}, parallel=True)
    free_grammar(form, {"f": schema}, parallel=False)
    if form == "qwen3_coder" and schema is CIRCULAR:
        with pytest.raises(InvalidRequest, match="cannot be strict"):
            check_strict(form, {"f": schema}, {"f"})
    else:
        check_strict(form, {"f": schema}, {"f"})
    assert arguments(schema, "5") == {"x": "5" if schema is CIRCULAR else 5}


def test_the_number_of_examined_alternatives_is_limited() -> None:
    """A grammar with more is refused; an answer's values are then read as whatever they look like."""
    # A schema, its list of options, and the options themselves, each twice.
    fitting = [{"type": "integer", "minimum": number} for number in range(MAX_ALTERNATIVES // 2 - 1)]
    for options, is_allowed in ((fitting, True), ([*fitting, {"type": "null"}], False)):
        schema = tool({"x": {"anyOf": options}}, {})
        if is_allowed:
            assert types_of(schema["properties"]["x"], schema, Allowance()) == {"integer"}
        else:
            with pytest.raises(InvalidRequest, match=str(MAX_ALTERNATIVES)) as refused:
                types_of(schema["properties"]["x"], schema, Allowance())
            assert refused.value.field == "tools"
            with pytest.raises(InvalidRequest, match=str(MAX_ALTERNATIVES)):
                calls_grammar("qwen3_coder", {"f": schema}, parallel=True)
            assert arguments(schema, "[1]") == {"x": [1]}, ALL_TYPES


def test_many_parameters_share_the_limit() -> None:
    """Each of them looks at the same alternatives anew."""
    shared = {"anyOf": [{"type": "string", "maxLength": number} for number in range(500)]}
    schema = tool({f"x{number}": {"anyOf": [ref("shared")]} for number in range(1000)}, {"shared": shared})
    with pytest.raises(InvalidRequest, match=str(MAX_ALTERNATIVES)):
        calls_grammar("qwen3_coder", {"f": schema}, parallel=True)
    long = tool({f"x{number}": {"anyOf": [ref("long")]} for number in range(1000)}, {"long": {"const": "x" * 500_000}})
    with pytest.raises(InvalidRequest, match=str(MAX_ALTERNATIVES)):
        check_strict("qwen3_coder", {"f": long}, {"f"})


@pytest.mark.parametrize("form", BY_PARAMETER)
def test_definitions_are_not_copied_beyond_the_limit(form: str) -> None:
    """2,000 parameters that name 600 KB took 3.5 GB before they were refused, and a minute."""
    big = {"type": "integer", "description": "x" * 600_000}
    many = {f"d{number}": {"type": "integer", "description": "x" * 300} for number in range(2000)}
    chained = {f"d{i}": {"type": "integer", "$comment": "x" * 300, "not": ref(f"d{i + 1}")} for i in range(2000)}
    half = {"type": "integer", "description": "x" * (MAX_GRAMMAR_CHARS // 2)}
    for properties, definitions in (
        ({f"p{number}": ref("big") for number in range(2000)}, {"big": big}),
        ({f"p{number}": {"$ref": "#anchor", "type": "integer"} for number in range(2000)}, many),
        ({f"p{number}": {"not": ref("d0"), "type": "integer"} for number in range(2000)}, chained),
        ({f"p{number}": ref("half") for number in range(2000)}, {"half": half}),
    ):
        schema = tool(properties, definitions)
        tracemalloc.start()
        begin = time.process_time()
        with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_CHARS)) as refused:
            calls_grammar(form, {"f": schema}, parallel=True)
        seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert refused.value.field == "tools"
        assert peak < 16 * 2**20
        assert seconds < 1


@pytest.mark.parametrize("form", FORMS)
def test_the_limit_holds_for_what_is_written_and_not_for_what_is_sent(form: str) -> None:
    """Definitions that no parameter names cost nothing where each has a rule of its own; escapes do not count."""
    unused = {"type": "object", "properties": {"a": {"const": '"' * 300_000}}}
    long = {"type": "integer", "description": '"' * (MAX_GRAMMAR_CHARS // 3)}
    assert calls_grammar(form, {"f": tool({"x": long}, {})}, parallel=True)
    longer = {"type": "integer", "description": '"' * MAX_GRAMMAR_CHARS}
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_CHARS)):
        calls_grammar(form, {"f": tool({"x": longer}, {})}, parallel=True)
    if form in BY_PARAMETER:
        assert calls_grammar(form, {"f": tool({"x": long}, {"unused": unused})}, parallel=True)
    else:
        with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_CHARS)):
            calls_grammar(form, {"f": tool({"x": long}, {"unused": unused})}, parallel=True)


@pytest.mark.parametrize("form", BY_PARAMETER)
def test_a_parameter_takes_along_what_it_leads_to(form: str) -> None:
    ends: Schema = {f"end{number}": {"type": "null"} for number in range(8)}
    item = {"next": ref("list"), "text": {"const": '"$ref":"#/$defs/no"'}, **{name: ref(name) for name in ends}}
    definitions = {
        "list": {"type": "array", "items": ref("it~0e~1m%20")},
        "it~e/m ": {"type": "object", "properties": item},
        **ends,
        "no": {"type": "object", "title": "not needed"},
    }
    text = calls_grammar(
        form, {"f": tool({"x": ref("list"), "y": {"type": "integer"}}, definitions)}, parallel=True
    ).text
    (x,) = (line for line in text.splitlines() if "value_0_0" in line and line.startswith("%grammar"))
    (y,) = (line for line in text.splitlines() if "value_0_1" in line and line.startswith("%grammar"))
    assert set(json.loads(json.loads(x.split(" ", 2)[2])[1])["$defs"]) == {"list", "it~e/m ", *ends}
    assert json.loads(json.loads(y.split(" ", 2)[2])[1]) == {"type": "integer"}
    for reference in ("#", "#/properties/y"):
        schema = tool({"x": {"type": "array", "items": {"$ref": reference}}, "y": {}}, {})
        with pytest.raises(InvalidRequest, match="is no definition"):
            calls_grammar(form, {"f": schema}, parallel=True)


@pytest.mark.parametrize("form", BY_PARAMETER)
def test_long_lists_of_what_is_required_cost_no_more_than_short_ones(form: str) -> None:
    names = [f"x{number}" for number in range(30_000)]
    schema = {**tool({name: {"type": "string"} for name in names}, {}), "required": names}
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_CHARS)):
        calls_grammar(form, {"f": schema}, parallel=True)
    assert time.process_time() - begin < 1


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Keep what other tests left out of garbage collections, as the API server does with all that it starts with."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_heap")
def test_a_call_in_python_that_takes_long_to_read_is_content() -> None:
    """Python calls are parsed on the event loop, so their syntax is bounded; long strings are cheap."""
    tools = {"f": tool({"x": {}}, {})}
    longest = "1," * (MAX_CODE_CHARS // 2 - 4)
    for value, is_call in (
        (f"[{longest}]", True),
        (f"[{longest}{longest}]", False),
        (f"{'x, ' * 300_000!r}", True),
        (f"f'{{[{longest * 30}]}}'", False),
        (f"fR'{{[{longest * 30}]}}'", False),
    ):
        text = f"[f(x={value})]"
        begin = time.process_time()
        parsed = run(PythonicParser(tools, lambda: "id"), [text])
        assert time.process_time() - begin < 0.5
        assert (len(parsed.calls), parsed.content) == ((1, "") if is_call else (0, text))


def test_a_value_in_python_that_takes_long_to_read_is_text() -> None:
    schema = tool({"x": {"type": "array"}}, {})
    for count, is_read in ((100, True), (10_000, False)):
        value = f"[{'1, ' * count}]"
        assert arguments(schema, value) == {"x": [1] * count if is_read else value}


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize(
    ("argument", "is_call"),
    [
        ("x" + " " * 9_000 + "=1", True),
        (" " * 9_000 + "x=1", True),
        ("#\n" * 4_500 + "x=1", True),
        ("x" + " " * 9_000, False),
        (" " * 9_000 + "x", False),
        ("#\n" * 4_500 + "x", False),
    ],
)
def test_blanks_of_a_call_in_python_are_read_once(argument: str, is_call: bool) -> None:
    begin = time.process_time()
    parsed = run(PythonicParser({"f": tool({"x": {}}, {})}, lambda: "id"), [f"[f({argument})]"])
    assert time.process_time() - begin < 0.5
    assert len(parsed.calls) == is_call


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_white_space_without_end_is_read_once(name: str) -> None:
    """It is held back, because a call may follow; a token can be a hundred blanks."""
    pieces = [" " * 100, ""] * 20_000 + ["x"]  # some tokens have no text
    begin = time.process_time()
    parsed = run(TOOL_CALL_PARSERS[name]({"f": tool({"x": {}}, {})}, lambda: "id"), pieces)
    assert time.process_time() - begin < 1
    assert parsed.content == "".join(pieces)


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", '<tool_call>{"x":['),
        ("llama3_json", '<|python_tag|>{"x":['),
        ("mistral", '[TOOL_CALLS]{"x":['),
        ("pythonic", "<|python_start|>[f(x=["),
    ],
)
def test_calls_begun_within_calls_are_not_all_parsed_again(name: str, unit: str) -> None:
    text = unit * 10_000
    begin = time.process_time()
    parsed = run(TOOL_CALL_PARSERS[name]({"f": tool({"x": {}}, {})}, lambda: "id"), [unit] * 10_000)
    assert time.process_time() - begin < 2
    assert (parsed.calls, parsed.content) == ([], text)


@pytest.mark.usefixtures("frozen_heap")
def test_the_name_of_a_call_in_python_is_read_once() -> None:
    pieces = ["[", *["word" * 8] * 5_000, "(x=1)]"]
    begin = time.process_time()
    parsed = run(PythonicParser({"f": tool({"x": {}}, {})}, lambda: "id"), pieces)
    assert time.process_time() - begin < 1
    assert parsed.content == "".join(pieces)

"""Grammars that demand tool calls: what they let through is what the parser of the same form reads as calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from minisgl.limits import Limits
from minisgl.message.to_tokenizer import ChatPrompt, TextPrompt
from minisgl.models.hub import demo_folder
from minisgl.parsers.parser_choice import TOOL_CALL_PARSERS
from minisgl.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from minisgl.parsers.streaming import CallArguments, CallStart, Content
from minisgl.parsers.tool_calls import Tools
from minisgl.sampling_params import Grammar, InvalidRequest, SamplingParams
from minisgl.structured_output.grammar_template import with_closed_schemas
from minisgl.structured_output.tool_grammar import calls_grammar, check_strict, either, free_grammar, schemas_to_enforce
from minisgl.structured_output.translate import complete_template, field_of, named_tokens, to_llguidance
from minisgl.structured_output.validator import GrammarValidator

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "days": {"type": "integer", "minimum": 1, "maximum": 99},
            "unit": {"enum": ["C", "F"]},
            "at": {"$ref": "#/$defs/Point"},
        },
        "required": ["city", "at"],
        "additionalProperties": False,
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "now": {"type": "object", "additionalProperties": False},
}
FORMS = ["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "mistral_named"]
PROMPT = ChatPrompt([{"role": "user", "content": "x"}])
THOUGHTLESS, OPEN, PLAIN = "<think>\n\n</think>\n\n", "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|im_end|>"))


@pytest.fixture(scope="module")
def matcher(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> Callable[..., LLMatcher]:
    def make(grammar: Grammar, prompt_end: str = "", form: ReasoningFormat | None = None) -> LLMatcher:
        fitted = fitter_for(tokenizer, form).fit(grammar, PROMPT, prompt_end)
        if fitted.kind == "template":
            fitted = complete_template(fitted, {text: index for index, text in named_tokens(tokenizer).items()})
        found = LLMatcher(vocabulary, to_llguidance(fitted))
        assert not found.is_error(), found.get_error()
        return found

    return make


def fitter_for(tokenizer: Tokenizer, form: ReasoningFormat | None) -> GrammarValidator:
    return GrammarValidator(named_tokens(tokenizer), form, time_limit=10.0)


def allows(matcher: LLMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """True if the model may write exactly this."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def sample(matcher: LLMatcher, tokenizer: Tokenizer, rng: random.Random, begin: str = "") -> str:
    """A text that the grammar allows, soon at its end."""
    ids: list[int] = tokenizer.encode(begin, add_special_tokens=False).ids
    assert matcher.consume_tokens(ids)
    # Of texts and lists that would hardly end by chance.
    closings = [tokenizer.encode(text).ids for text in ("\n</parameter>\n", '"', "}", "]")]
    end = tokenizer.token_to_id("<|im_end|>")
    while len(ids) < 2000:
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)).tolist()
        if end in allowed:
            if len(allowed) == 1 or rng.random() < 0.5:
                return str(tokenizer.decode(ids, skip_special_tokens=False))
            allowed.remove(end)
        if rng.random() < 0.2:
            closing = next((one for one in closings if matcher.validate_tokens(one) == len(one)), [])
            ids += closing
            assert matcher.consume_tokens(closing)
            continue
        plain = [token for token in allowed if tokenizer.decode([token]) not in (" ", "\n", "\t", "\r")]
        ids.append(rng.choice(plain or allowed))
        assert matcher.consume_token(ids[-1])
    raise AssertionError("no end")


@pytest.mark.parametrize("form", FORMS)
def test_allowed_texts_parse_as_valid_calls(matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, form: str) -> None:
    rng = random.Random(form)
    seen: list[int] = []
    for parallel in (True, False):
        grammar = calls_grammar(form, TOOLS, parallel=parallel)
        for _ in range(8):
            text = sample(matcher(grammar), tokenizer, rng)
            parser = TOOL_CALL_PARSERS[form.removesuffix("_named")](TOOLS, lambda: "id")
            calls: list[tuple[str, str]] = []
            for event in [*parser.feed(text), *parser.finish()]:
                match event:
                    case CallStart(_, _, name):
                        calls.append((name, ""))
                    case CallArguments(_, more):
                        calls[-1] = (calls[-1][0], calls[-1][1] + more)
                    case _:
                        raise AssertionError((text, event))
            assert calls, text
            assert parallel or len(calls) == 1
            seen.append(len(calls))
            for name, arguments in calls:
                check_arguments(name, json.loads(arguments))
    assert max(seen) > 1 or form == "llama3_json"


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    if name == "now":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert {"city", "at"} <= arguments.keys() <= {"city", "days", "unit", "at"}
    assert isinstance(arguments["city"], str)
    assert isinstance(arguments["at"]["x"], bool)
    assert arguments.get("unit", "C") in ("C", "F")
    assert 1 <= arguments.get("days", 1) <= 99


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", CALL),
        ("hermes", f"{CALL}\n{CALL}"),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n<b>\n</parameter>\n"
            '<parameter=at>\n{"x": true}\n</parameter>\n</function>\n</tool_call>',
        ),
        ("llama3_json", '{"name": "now", "parameters": {}}'),
        ("pythonic", '[get_weather(city="Oslo", days=3, at={"x": false}), now()]'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        ("mistral_named", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"),
    ],
)
def test_models_can_write_as_they_do(
    matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, form: str, text: str
) -> None:
    grammar = calls_grammar(form, TOOLS, parallel=True)
    assert allows(matcher(grammar), tokenizer, text)
    assert not allows(matcher(grammar), tokenizer, "Hello")
    assert not allows(matcher(grammar), tokenizer, f"{text}Hello")
    for wrong in (text.replace("now", "later"), text.replace("at", "to")):
        assert wrong == text or not allows(matcher(grammar), tokenizer, wrong)


SCHEMA = Grammar("json_schema", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')
CONTENTS = [
    (SCHEMA, '{"a": 1}', '{"a": 2}'),
    (Grammar("json_object"), '{"b": []}', "[]"),
    (Grammar("regex", 'a/b\\/c\n["x]'), 'a/b/c\n"', "abc"),
    (Grammar("choice", '["yes", "n\\no\\""]'), 'n\no"', "no"),
    (Grammar("ebnf", 'root ::= "x" root | "y"'), "xxy", "xx"),
    (Grammar("lark", 'start: "}" a\na: "{" | "z"'), "}{", "{}"),
    (calls_grammar("hermes", TOOLS, parallel=True), CALL, '{"name": "now"}'),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), CONTENTS)
def test_a_thought_may_come_first(
    matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, grammar: Grammar, good: str, bad: str
) -> None:
    thought = "Hm, <b> {\n\n</think>\n\n"
    qwen = REASONING_FORMATS["qwen3"]
    for end, allowed in {
        THOUGHTLESS: {good: True, f"<think>{thought}{good}": False, bad: False},
        PLAIN: {good: True, f"<think>{thought}{good}": True, f"<think>{thought}{bad}": False, bad: False},
        OPEN: {f"{thought}{good}": True, f"{thought}{bad}": False, "Hm</think>" + good: True},
    }.items():
        for text, expected in allowed.items():
            assert allows(matcher(grammar, end, qwen), tokenizer, text) is expected, (end, text)
    assert allows(matcher(grammar, OPEN), tokenizer, good)  # for a model that does not think


def test_a_thought_without_tokens_of_its_own(matcher: Callable[..., LLMatcher], tokenizer: Tokenizer) -> None:
    """The markers of a vocabulary that has no tokens for them are text."""
    form = ReasoningFormat("[THINK]", "[/THINK]")
    assert allows(matcher(SCHEMA, PLAIN, form), tokenizer, '[THINK]a [ b[/THINK]\n{"a": 1}')
    assert not allows(matcher(SCHEMA, PLAIN, form), tokenizer, '[THINK]a[/THINK]{"a": 2}')
    assert allows(matcher(SCHEMA, PLAIN, form), tokenizer, '{"a": 1}')


def test_a_continued_answer_has_no_thought(tokenizer: Tokenizer) -> None:
    fitter = fitter_for(tokenizer, REASONING_FORMATS["qwen3"])
    begun = ChatPrompt([{"role": "assistant", "content": "It is"}], continue_final_message=True)
    assert fitter.fit(SCHEMA, begun, PLAIN) == SCHEMA
    thinking = ChatPrompt([{"role": "assistant", "content": "<think>It is"}], continue_final_message=True)
    assert fitter.fit(SCHEMA, thinking, PLAIN) != SCHEMA
    assert fitter.fit(SCHEMA, TextPrompt("x"), "") == SCHEMA


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic", "mistral", "mistral_named"])
def test_calls_or_content(matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, form: str) -> None:
    """The model still chooses between content that is constrained and a call."""
    text = {
        "hermes": CALL,
        "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "pythonic": "[now()]",
        "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        "mistral_named": "[TOOL_CALLS]now[ARGS]{}",
    }[form]
    grammar = either(form, calls_grammar(form, TOOLS, parallel=False), SCHEMA)
    for end, before in ((THOUGHTLESS, ""), (PLAIN, ""), (PLAIN, "<think>Hm</think>")):
        for answer, expected in ((text, True), ('{"a": 1}', True), ('{"a": 2}', False), ("Hi", False)):
            found = matcher(grammar, end, REASONING_FORMATS["qwen3"])
            assert allows(found, tokenizer, before + answer) is expected, (before, answer)


@pytest.mark.parametrize("form", FORMS)
def test_names_that_are_none_in_python(matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, form: str) -> None:
    """Tools and parameters of other servers have such names."""
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in ("from", "max-results", "a b")}}
    closed = {"required": list(schema["properties"]), "additionalProperties": False}
    tools = {"2nd/get-page": schema | closed}
    text = sample(matcher(calls_grammar(form, tools, parallel=False)), tokenizer, random.Random(form))
    ((name, arguments),) = read_calls(form, text, tools)[1]
    assert name == "2nd/get-page"
    assert list(arguments) == ["from", "max-results", "a b"]


def test_a_parameter_that_cannot_be_written_is_refused() -> None:
    for key in ("", "a=b", "(", " a", '"a"'):
        with pytest.raises(InvalidRequest, match="cannot be written"):
            calls_grammar("pythonic", {"f": {"type": "object", "properties": {key: {}}}}, parallel=False)


def test_unsupported_schemas_are_refused_by_the_name_of_their_field(tokenizer: Tokenizer) -> None:
    """The field is named even after a thought, and for a tool's arguments."""
    fitter = fitter_for(tokenizer, REASONING_FORMATS["qwen3"])
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}

    def check(grammar: Grammar, end: str) -> None:
        fitter.check(fitter.fit(grammar, PROMPT, end)).result(field_of(grammar))

    for end in (THOUGHTLESS, PLAIN):
        with pytest.raises(InvalidRequest) as schema:
            check(Grammar("json_schema", json.dumps(bad)), end)
        assert schema.value.field == "response_format"
        with pytest.raises(InvalidRequest) as calls:
            check(calls_grammar("hermes", {"f": bad}, parallel=False), end)
        assert calls.value.field == "structured_outputs"  # the chat API renames it to "tools"


@pytest.mark.parametrize("form", [*FORMS, "harmony"])
def test_a_refused_schema_is_named_by_its_tool(tokenizer: Tokenizer, form: str) -> None:
    unique = {"type": "array", "uniqueItems": True}
    tools = {**TOOLS, "odd": {"type": "object", "properties": {"a": unique}}, "last": TOOLS["now"]}
    validator = GrammarValidator(named_tokens(tokenizer))
    calls, content = calls_grammar(form, tools, parallel=True), Grammar("json_schema", json.dumps(unique))
    sentence = 'this grammar is not supported: {}keywords that cannot be followed: "uniqueItems"'
    for grammar, owner in (
        (calls, "the parameters of odd: "),
        (free_grammar(form, tools, parallel=False), "the parameters of odd: "),
        (either(form, calls, Grammar("json_object")), "the parameters of odd: "),
        (either(form, calls_grammar(form, TOOLS, parallel=True), content), ""),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            validator.validate(grammar, "tools")
        assert str(refusal.value) == sentence.format(owner)
    validator.close()


@pytest.mark.parametrize(
    "text",
    [
        'start: %marker "</think>"',
        'start: a\n%grammar a ["regex", "b"]',
        "start: a\n%grammar a [5]",
        'start: begin\n%until begin "x"\nTEXT: /b*/',
    ],
)
def test_clients_cannot_write_templates(tokenizer: Tokenizer, text: str) -> None:
    """Templates are refused both at the start of a grammar and after a thought."""
    fitter = fitter_for(tokenizer, REASONING_FORMATS["qwen3"])
    for end in (THOUGHTLESS, PLAIN):
        with pytest.raises(InvalidRequest) as refused:
            fitter.check(fitter.fit(Grammar("lark", text), PROMPT, end)).result("guided_grammar")
        assert refused.value.field == "guided_grammar"
    with pytest.raises(InvalidRequest, match="template"):
        SamplingParams(grammar=Grammar("template", text)).validate(Limits(max_seq_len=32, vocab_size=330))


def test_texts_that_look_like_a_template_are_texts(matcher: Callable[..., LLMatcher], tokenizer: Tokenizer) -> None:
    text = '%marker "xyz"'
    for grammar in (Grammar("regex", text), Grammar("choice", json.dumps([text]))):
        for end in (THOUGHTLESS, PLAIN):
            assert allows(matcher(grammar, end, REASONING_FORMATS["qwen3"]), tokenizer, text)


# What a model is free to call: strict tools.

STRICT: dict[str, dict[str, Any]] = {
    "book": {
        "type": "object",
        "properties": {
            "name": {"type": ["string", "null"], "description": "as OpenAI's clients write what is optional"},
            "nights": {"type": "integer", "minimum": 1, "maximum": 14},
            "room": {"$ref": "#/$defs/Room"},
            "board": {"anyOf": [{"enum": ["full", "half"]}, {"type": "null"}]},
            "at": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
        },
        "required": ["name", "nights", "room", "board", "at"],
        "additionalProperties": False,
        "$defs": {"Room": {"enum": ["single", "double"], "title": "Room", "type": "string"}},
    },
    "now": {"type": "object", "properties": {"zone": {"type": "integer"}}},
}
BOOKING = {"name": "A", "nights": 2, "room": "single", "board": None, "at": {"x": True}}


def written(form: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as models write it."""
    text = json.dumps(arguments)
    if form in ("hermes", "llama3_json"):
        key = "arguments" if form == "hermes" else "parameters"
        call = f'{{"name": "{name}", "{key}": {text}}}'
        return f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call
    if form == "mistral":
        return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {text}}}]'
    if form == "mistral_named":
        return f"[TOOL_CALLS]{name}[ARGS]{text}"
    if form == "pythonic":
        return f"[{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in plain.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def read_calls(form: str, text: str, tools: Tools = STRICT) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of an answer."""
    parser = TOOL_CALL_PARSERS[form.removesuffix("_named")](tools, lambda: "id")
    content = ""
    calls: list[tuple[str, str]] = []
    for event in [*parser.feed(text), *parser.finish()]:
        match event:
            case Content(more):
                content += more
            case CallStart(_, _, name):
                calls.append((name, ""))
            case CallArguments(_, more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_free_to_call_but_not_to_call_wrongly(
    matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, form: str
) -> None:
    grammar = free_grammar(form, schemas_to_enforce(STRICT, {"book"}), parallel=True)
    call = written(form, "book", BOOKING)
    positional = form in ("llama3_json", "pythonic")  # a call is the whole answer
    good = ["", "Hello {a} [b]: a < b", "It is <tool_cal or [TOOL_", "  \n", call]
    good += [written(form, "now", {"zone": "not strict"})]
    good += [] if positional else [f"Let me see.\n{call}"]
    good += [f"{call}{call}", f"Yes. {call}\n{call} Done."] if form.startswith(("hermes", "mistral")) else []
    for text in good:
        assert allows(matcher(grammar), tokenizer, text), text
    wrong = [written(form, "book", BOOKING | change) for change in ({"nights": 15}, {"room": "suite"}, {"at": {}})]
    wrong += [written(form, "later", {}), call[:-1], f" {TOOL_CALL_PARSERS[form.removesuffix('_named')].markers[-1]}"]
    for text in wrong:
        assert not allows(matcher(grammar), tokenizer, text), text
    once = free_grammar(form, schemas_to_enforce(STRICT, {"book"}), parallel=False)
    assert allows(matcher(once), tokenizer, call)
    assert not allows(matcher(once), tokenizer, call + call)
    for end in (PLAIN, OPEN):  # after a thought, which is free
        found = matcher(grammar, end, REASONING_FORMATS["qwen3"])
        before = "Hm <b> {</think>" if end == OPEN else "<think>Hm</think>\n"
        assert allows(found, tokenizer, before + call)
        assert not allows(matcher(grammar, end, REASONING_FORMATS["qwen3"]), tokenizer, before + wrong[0])


@pytest.mark.parametrize("end", [THOUGHTLESS, PLAIN])
def test_closed_schemas_of_arguments(tokenizer: Tokenizer, matcher: Callable[..., LLMatcher], end: str) -> None:
    """The grammars of tools are within templates, those of answers after a thought too."""
    tools = {"on": {"type": "object", "properties": {"at": {}}}, "now": {"type": "object", "properties": {"zone": {}}}}
    grammar = free_grammar("hermes", schemas_to_enforce(tools, {"on"}), parallel=False)
    closed = with_closed_schemas(fitter_for(tokenizer, REASONING_FORMATS["qwen3"]).fit(grammar, PROMPT, end))
    thought = "<think>Hm</think>\n" if end == PLAIN else ""
    cases = ("on", {"at": 1, "b": 2}, False), ("on", {"at": 1}, True), ("now", {"b": 2}, True)
    for name, arguments, allowed in cases:
        assert allows(matcher(closed), tokenizer, thought + written("hermes", name, arguments)) == allowed


@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_read_as_a_call_of_a_strict_tool_is_valid(
    matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, form: str
) -> None:
    """Random tokens, with a call's beginning now and then."""
    rng = random.Random(form)
    begin = written(form, "book", BOOKING).partition("book")[0] + "book"
    grammar = free_grammar(form, schemas_to_enforce(STRICT, {"book"}), parallel=True)
    found = matcher(grammar)
    num_calls = 0
    for _ in range(10):
        text = sample(found.deep_copy(), tokenizer, rng, begin if rng.random() < 0.7 else "")
        for name, arguments in read_calls(form, text)[1]:
            assert name in STRICT, text
            if name == "book":
                num_calls += 1
                jsonschema.Draft202012Validator(STRICT["book"]).validate(arguments)
    assert num_calls >= 3


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^a"}}}, "a"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}}, "a"),
        ({"properties": {"a": {"enum": ["a", 2, None]}}}, None),
        ({"properties": {"a": {"enum": ["1", 2]}}}, "a"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 2}]}}}, "a"),
        ({"properties": {"a": {"type": ["string", "null"]}, "b": {}, "c": True}}, None),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}, "a"),
        ({"properties": {"a": {"$ref": "#/$defs/A", "pattern": "^a"}}, "$defs": {"A": {"type": "string"}}}, "a"),
        ({"properties": {"a": {"allOf": [{"type": "string"}], "pattern": "^a"}}}, "a"),
        ({"properties": {"a": {"allOf": [{"type": "string"}], "default": "a"}}}, None),
        ({"properties": {}, "required": ["a"]}, "a"),
        ({"properties": {}, "minProperties": 1}, "minProperties"),
    ],
)
def test_keywords_that_a_format_cannot_enforce_refuse_strict(schema: dict[str, Any], key: str | None) -> None:
    tools = {"f": {"type": "object", **schema}}
    check_strict("hermes", tools, {"f"})
    check_strict("qwen3_coder", tools, {"another"})
    if key is None:
        check_strict("qwen3_coder", tools, {"f"})
    else:
        with pytest.raises(InvalidRequest, match=f"'{key}'"):
            check_strict("qwen3_coder", tools, {"f"})

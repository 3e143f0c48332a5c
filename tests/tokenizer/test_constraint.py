"""Grammars that demand tool calls: what they let through is what the parser of the same form reads as calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from minisgl.core import Grammar, InvalidRequest
from minisgl.grammar.text import field_of, to_llguidance
from minisgl.grammar.validate import GrammarValidator
from minisgl.grammar.vocabulary import named_tokens
from minisgl.message.to_tokenizer import ChatPrompt, TextPrompt
from minisgl.models.demo import demo_folder
from minisgl.parsers.constraint import calls_grammar, either
from minisgl.parsers.events import CallArguments, CallStart
from minisgl.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from minisgl.parsers.select import TOOL_CALL_PARSERS
from minisgl.tokenizer.constraint import GrammarFitter

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
        found = LLMatcher(vocabulary, to_llguidance(fitted))
        assert not found.is_error(), found.get_error()
        return found

    return make


def fitter_for(tokenizer: Tokenizer, form: ReasoningFormat | None) -> GrammarFitter:
    names = named_tokens(tokenizer)
    return GrammarFitter(names, form, GrammarValidator(names, time_limit=10.0))


def allows(matcher: LLMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the model may write exactly this."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def sample(matcher: LLMatcher, tokenizer: Tokenizer, rng: random.Random) -> str:
    """A text that the grammar allows, soon at its end."""
    ids: list[int] = []
    closing = tokenizer.encode("\n</parameter>\n").ids  # of a text that would never end by chance
    end = tokenizer.token_to_id("<|im_end|>")
    while len(ids) < 2000:
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)).tolist()
        if end in allowed:
            if len(allowed) == 1 or rng.random() < 0.5:
                return str(tokenizer.decode(ids, skip_special_tokens=False))
            allowed.remove(end)
        if len(ids) % 5 == 4 and matcher.validate_tokens(closing) == len(closing):
            ids += closing
            assert matcher.consume_tokens(closing)
            continue
        plain = [token for token in allowed if tokenizer.decode([token]) not in (" ", "\n", "\t", "\r")]
        ids.append(rng.choice(plain or allowed))
        assert matcher.consume_token(ids[-1])
    raise AssertionError("no end")


@pytest.mark.parametrize("form", FORMS)
def test_what_is_allowed_is_read_as_calls(matcher: Callable[..., LLMatcher], tokenizer: Tokenizer, form: str) -> None:
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
    """Where content is constrained, the model still chooses between it and a call."""
    text = {
        "hermes": CALL,
        "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "pythonic": "[now()]",
        "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        "mistral_named": "[TOOL_CALLS]now[ARGS]{}",
    }[form]
    grammar = either(calls_grammar(form, TOOLS, parallel=False), SCHEMA)
    for end, before in ((THOUGHTLESS, ""), (PLAIN, ""), (PLAIN, "<think>Hm</think>")):
        for answer, expected in ((text, True), ('{"a": 1}', True), ('{"a": 2}', False), ("Hi", False)):
            found = matcher(grammar, end, REASONING_FORMATS["qwen3"])
            assert allows(found, tokenizer, before + answer) is expected, (before, answer)


def test_what_cannot_be_followed_is_refused_by_the_name_of_its_field(tokenizer: Tokenizer) -> None:
    """Also behind a thought, and among the arguments of a tool."""
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
        assert calls.value.field == "structured_outputs"  # which a chat calls tools

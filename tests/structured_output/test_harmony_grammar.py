"""Grammars in Harmony's format: thoughts are free, the final channel and the arguments of calls are not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from minisgl.message.to_tokenizer import ChatPrompt
from minisgl.models.hub import demo_folder
from minisgl.parsers.harmony import HARMONY, HarmonyParser
from minisgl.parsers.reasoning import REASONING_FORMATS
from minisgl.sampling_params import Grammar
from minisgl.structured_output.tool_grammar import calls_grammar, either, free_grammar
from minisgl.structured_output.translate import complete_template, named_tokens, to_llguidance
from minisgl.structured_output.validator import GrammarValidator

TOOLS = {"f": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}}
SCHEMA = Grammar("json_schema", json.dumps(TOOLS["f"]))
THOUGHT = "<|channel|>analysis<|message|>Hm, <b> {<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
Allows = Callable[[Grammar, str], bool]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def allows(request: pytest.FixtureRequest) -> Allows:
    """Return what tells if the model may write exactly a text; its markers may be tokens or be spelled out."""
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    if request.param:
        tokenizer.add_special_tokens(list(HarmonyParser.kept))
    vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|im_end|>"))
    named = named_tokens(tokenizer)
    validator = GrammarValidator(named, REASONING_FORMATS[HARMONY])

    def check(grammar: Grammar, text: str) -> bool:
        fitted = validator.fit(grammar, ChatPrompt([{"role": "user", "content": "x"}]), "<|start|>assistant")
        whole = complete_template(fitted, {text: index for index, text in named.items()})
        matcher = LLMatcher(vocabulary, to_llguidance(whole))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())

    return check


def test_the_final_channel_is_constrained(allows: Allows) -> None:
    for before in ("", THOUGHT, THOUGHT * 2):
        assert allows(SCHEMA, before + FINAL + '{"a": 1}')
        assert allows(SCHEMA, before + '<|channel|>final <|constrain|>json<|message|>{"a": 1}')
        assert not allows(SCHEMA, before + FINAL + '{"a": 2}')
        assert not allows(SCHEMA, before + '{"a": 1}')
    assert not allows(SCHEMA, THOUGHT)


def test_calls_are_constrained_by_their_schema(allows: Allows) -> None:
    demanded = calls_grammar(HARMONY, TOOLS, parallel=True)
    chosen = either(HARMONY, demanded, SCHEMA)
    free = free_grammar(HARMONY, TOOLS, parallel=True)
    for before in ("", THOUGHT):
        for grammar in (demanded, chosen, free):
            assert allows(grammar, before + CALL + '{"a": 1}')
            assert not allows(grammar, before + CALL + '{"a": 2}')
            assert not allows(grammar, before + CALL.replace(".f", ".g") + '{"a": 1}')
        assert [allows(grammar, before + FINAL + '{"a": 1}') for grammar in (demanded, chosen, free)] == [0, 1, 1]
        assert [allows(grammar, before + FINAL + "Hello") for grammar in (demanded, chosen, free)] == [0, 0, 1]

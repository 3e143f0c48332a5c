"""Structured output through the whole engine: a tiny random model, which does not know what JSON is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.llm import LLM
from minisgl.llm.completion import Completion
from minisgl.models.hub import demo_folder
from minisgl.sampling_params import Grammar, InvalidRequest, SamplingParams
from models.tiny import make_model
from structured_output.schemas import own_schemas
from structured_output.test_json_schema import check, grammar_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "tags", "born"],
    "additionalProperties": False,
}
EXPRESSION = r"""
root ::= "=" sum
sum ::= term ([-+] term){0,2}
term ::= [0-9]{1,2} | "(" [0-9]{1,2} ")"
"""
KINDS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[a-f]{3}-[0-9]{2}"),
    Grammar("choice", '["yes", "no", "perhaps"]'),
    Grammar("ebnf", EXPRESSION),
    Grammar("lark", 'start: "<" /[xy]{2,4}/ ">"'),
    Grammar("json_object"),
    None,
]
PROMPTS = [f"Number {number} is" for number in range(2 * len(KINDS))]
PARAMS = [
    SamplingParams(temperature=1.0 - number % 2, seed=number, max_tokens=150, ignore_eos=kind is None, grammar=kind)
    for number, kind in enumerate(KINDS * 2)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo model's tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    vocabulary = json.loads((demo_folder() / "config.json").read_text())["vocab_size"]
    make_model("qwen3", vocab_size=vocabulary, eos_token_id=[258, 256], bos_token_id=None).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_folder() / name, path / name)
    return path


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", **{"device": "cpu", "max_running_req": 16, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder, max_running_req=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[Completion]:
    """Answers that the others must give as well."""
    return llm.generate(PROMPTS, PARAMS)


def test_each_kind_gives_what_it_allows(answers: list[Completion]) -> None:
    schema, regex, choice, ebnf, lark, json_object, free = (answers[kind :: len(KINDS)] for kind in range(len(KINDS)))
    for answer in [*schema, *regex, *choice, *ebnf, *lark]:
        assert answer["finish_reason"] == "stop"
    for answer in schema:
        check(SCHEMA, answer["text"])
    assert all(re.fullmatch("[a-f]{3}-[0-9]{2}", answer["text"]) for answer in regex)
    assert {answer["text"] for answer in choice} <= {"yes", "no", "perhaps"}
    assert all(re.fullmatch(r"=[-+()0-9]+", answer["text"]) for answer in ebnf)
    assert all(re.fullmatch("<[xy]{2,4}>", answer["text"]) for answer in lark)
    for answer in json_object:
        assert answer["text"].startswith("{")
        assert answer["finish_reason"] != "stop" or isinstance(json.loads(answer["text"]), dict)
    assert [answer["finish_reason"] for answer in free] == ["length", "length"]


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"batch_policy": "mixed", "max_extend_tokens": 5},
        {"num_page_override": 50, "page_size": 4},
        {"tp_size": 2},
    ],
    ids=["no overlap", "chunks", "retraction", "two ranks"],
)
def test_answers_do_not_depend_on_the_schedule(
    folder: Path, answers: list[Completion], options: dict[str, Any]
) -> None:
    with make_llm(folder, **options) as llm:
        again = llm.generate(PROMPTS, PARAMS)
        llm.check_idle()
        assert (llm.retractions > 0) == ("num_page_override" in options)
    assert [answer["token_ids"] for answer in again] == [answer["token_ids"] for answer in answers]
    assert [answer["finish_reason"] for answer in again] == [answer["finish_reason"] for answer in answers]


def test_free_rows_do_not_notice_their_company(llm: LLM, answers: list[Completion]) -> None:
    rows = [number for number in range(len(PROMPTS)) if PARAMS[number].grammar is None]
    alone = llm.generate([PROMPTS[row] for row in rows], [PARAMS[row] for row in rows])
    assert [answer["token_ids"] for answer in alone] == [answers[row]["token_ids"] for row in rows]


def test_greedy_and_sampled_answers_under_our_own_schemas(llm: LLM, request: pytest.FixtureRequest) -> None:
    draws: int = request.config.getoption("--grammar-draws")
    schemas = list(own_schemas().items())
    schemas = schemas[:: max(1, len(schemas) // (20 * draws))]
    asked = [(name, schema, temperature) for name, schema in schemas for temperature in (0.0, 1.0)]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=100, grammar=grammar_of(schema))
        for number, (_, schema, temperature) in enumerate(asked)
    ]
    answers = llm.generate(["JSON:"] * len(asked), params)
    llm.check_idle()
    for (name, schema, _), answer in zip(asked, answers, strict=True):
        assert answer["finish_reason"] in ("stop", "length"), name
        if answer["finish_reason"] == "stop":
            check(schema, answer["text"])
    assert sum(answer["finish_reason"] == "stop" for answer in answers) > len(asked) / 3


def test_token_limits_and_ignore_eos_within_a_grammar(llm: LLM) -> None:
    letters = Grammar("regex", "[ab]{2,6}")
    base = SamplingParams(max_tokens=20, grammar=letters)
    ignoring, at_least, limited = (
        SamplingParams(max_tokens=20, grammar=letters, ignore_eos=True),
        SamplingParams(max_tokens=20, grammar=letters, min_tokens=6),
        SamplingParams(max_tokens=1, grammar=letters),
    )
    _, ignored, long, cut = llm.generate(["x"] * 4, [base, ignoring, at_least, limited])
    assert (ignored["finish_reason"], len(ignored["text"])) == ("stop", 6)
    assert (long["finish_reason"], len(long["text"])) == ("stop", 6)
    assert (cut["finish_reason"], len(cut["text"])) == ("length", 1)
    (beyond,) = llm.generate(["x"], SamplingParams(max_tokens=20, grammar=letters, min_tokens=12))
    assert (beyond["finish_reason"], len(beyond["text"])) == ("stop", 6), "a complete grammar ends before min_tokens"
    (impossible,) = llm.generate(["x"], SamplingParams(max_tokens=20, grammar=letters, allowed_token_ids=(99,)))
    assert impossible["finish_reason"] == "error"
    text = llm.tokenizer.decode(impossible["token_ids"])  # of the token in place of one that is allowed
    (hidden,) = llm.generate(["x"], SamplingParams(grammar=letters, allowed_token_ids=(99,), stop=(text,)))
    assert (hidden["finish_reason"], hidden["text"]) == ("error", ""), "a stop string does not hide the error"
    llm.check_idle()


def test_bad_grammars_are_refused_before_anything_runs(llm: LLM) -> None:
    grammar = grammar_of({"type": "array", "uniqueItems": True})
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        llm.generate(["x", "y"], [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, grammar=grammar)])
    llm.check_idle()

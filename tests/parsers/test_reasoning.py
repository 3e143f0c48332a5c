"""The thought before the answer, and the two together with tool calls."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import Parsed, cut, run

from minisgl.parsers.json_forms import HermesParser
from minisgl.parsers.parser_choice import OutputParser
from minisgl.parsers.reasoning import REASONING_FORMATS, Place, ReasoningParser, start_of_answer
from minisgl.parsers.streaming import Content, Reasoning

QWEN, R1, MISTRAL = (REASONING_FORMATS[name] for name in ("qwen3", "deepseek_r1", "mistral"))


@pytest.mark.parametrize(
    ("prompt_end", "qwen", "r1"),
    [
        ("<|im_start|>assistant\n", Place.UNDECIDED, Place.INSIDE),
        ("<|im_start|>assistant\n<think>\n", Place.INSIDE, Place.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Place.OUTSIDE, Place.OUTSIDE),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", Place.UNDECIDED, Place.INSIDE),
    ],
)
def test_start_of_answer(prompt_end: str, qwen: Place, r1: Place) -> None:
    assert (start_of_answer(QWEN, prompt_end), start_of_answer(R1, prompt_end)) == (qwen, r1)


@pytest.mark.parametrize(
    ("form", "start", "text", "reasoning", "content"),
    [
        (QWEN, Place.UNDECIDED, "<think>\nHm.\nOk.\n</think>\n\nHello.\n", "Hm.\nOk.", "Hello.\n"),
        (QWEN, Place.UNDECIDED, "\n <think>Hm.</think>Hello", "Hm.", "Hello"),
        (QWEN, Place.UNDECIDED, "Hello <think>no</think>", "", "Hello <think>no</think>"),
        (QWEN, Place.UNDECIDED, "<thin", "", "<thin"),
        (QWEN, Place.UNDECIDED, "<think>\n\n</think>\n\nHello", "", "Hello"),
        (QWEN, Place.UNDECIDED, "<think>Hm</thi", "Hm</thi", ""),
        (QWEN, Place.UNDECIDED, "<think>\n a\n\nb \n", " a\n\nb \n", ""),
        (QWEN, Place.INSIDE, "Hm.\n</think>\n\nHello </think>", "Hm.", "Hello </think>"),
        (QWEN, Place.INSIDE, "<think>Hm.</think>Hello", "Hm.", "Hello"),  # the model opens the block a second time
        (QWEN, Place.OUTSIDE, "\n<think>Hm.</think>Hello", "", "\n<think>Hm.</think>Hello"),
        (R1, Place.INSIDE, "Hm.", "Hm.", ""),
        (R1, Place.INSIDE, "</think>Hello", "", "Hello"),
        (MISTRAL, Place.UNDECIDED, "[THINK]Hm.[/THINK]Hello", "Hm.", "Hello"),
    ],
)
def test_thoughts_are_parted_from_content(form: object, start: Place, text: str, reasoning: str, content: str) -> None:
    expected = Parsed(content=content, reasoning=reasoning)
    assert run(ReasoningParser(form, start), [text]) == expected  # type: ignore[arg-type]
    assert run(ReasoningParser(form, start), list(text)) == expected  # type: ignore[arg-type]


def whole_parser(start: Place) -> OutputParser:
    ids = itertools.count()
    return OutputParser(ReasoningParser(QWEN, start), HermesParser({}, lambda: f"id{next(ids)}"))


FRAGMENTS = ["<think>", "</think>", "<th", "ink>", "\n", " ", "x", "<tool_call>", '{"name": "f"}', "</tool_call>", "é"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(Place), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.lists(st.integers(0, 99), max_size=9)
)
def test_any_cut_gives_the_same(start: Place, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    whole = run(whole_parser(start), [text])
    assert run(whole_parser(start), cut(text, cuts)) == whole
    assert run(whole_parser(start), list(text)) == whole


def test_thought_then_call() -> None:
    text = 'Hm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    parsed = run(whole_parser(Place.INSIDE), list(text))
    assert parsed == Parsed(reasoning="Hm.", calls=[("f", '{"a": 1}')], ids=["id0"])


def test_a_call_in_a_thought_is_a_thought() -> None:
    text = '<think><tool_call>{"name": "f"}</tool_call></think>Hi'
    parsed = run(whole_parser(Place.UNDECIDED), list(text))
    assert parsed == Parsed(reasoning='<tool_call>{"name": "f"}</tool_call>', content="Hi")


def test_tokens_of_the_thought_are_counted() -> None:
    def count(start: Place, pieces: list[str]) -> int:
        parser = whole_parser(start)
        for piece in pieces:
            parser.feed(piece, 1)
        parser.finish()
        return parser.reasoning_tokens

    assert count(Place.UNDECIDED, ["<think>", "\n", "Hm", ".", "\n", "</think>", "\n\n", "Hello", "."]) == 6
    assert count(Place.UNDECIDED, ["<", "think", ">", "Hm", "</", "think>", "Hello"]) == 6
    assert count(Place.UNDECIDED, ["<", "b", ">"]) == 0
    assert count(Place.INSIDE, ["Hm", "", "</think>", "Hello"]) == 3
    assert count(Place.OUTSIDE, ["Hello"]) == 0


def test_text_is_passed_on_while_it_is_written() -> None:
    parser = ReasoningParser(QWEN, Place.INSIDE)
    assert parser.feed("I think") == [Reasoning("I think")]
    assert parser.feed(" so.\n") == [Reasoning(" so.")]
    assert parser.feed("</thin") == []
    assert parser.feed("k>\n\nYes") == [Content("Yes")]
    assert parser.feed(".\n") == [Content(".\n")]

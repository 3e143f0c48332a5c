"""Harmony's channels: what gpt-oss writes, whole, cut anywhere, and broken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import Parsed, cut, run

from minisgl.parsers.harmony import MAX_HEADER, HarmonyParser
from minisgl.parsers.streaming import CallArguments, CallStart, Reasoning

PROMPT_END = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"


def new_id() -> Callable[[], str]:
    ids = itertools.count()
    return lambda: f"id{next(ids)}"


def parser(tools: Sequence[str] = ("f",), *, thoughts: bool = True, end: str = PROMPT_END) -> HarmonyParser:
    return HarmonyParser(tools, new_id(), reasoning=thoughts, prompt_end=end)


def parsed(text: str, pieces: Sequence[str] | None = None, **options: object) -> Parsed:
    return run(parser(**options), [text] if pieces is None else pieces)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (THOUGHT + FINAL, "Hm.", "Hello", []),
        (THOUGHT + FINAL + "<|return|>", "Hm.", "Hello", []),
        ("<|channel|>final<|message|>Hello", "", "Hello", []),
        (THOUGHT + CALL, "Hm.", "", [("f", '{"a": 1}')]),
        (THOUGHT + CALL + "<|call|>", "Hm.", "", [("f", '{"a": 1}')]),
        (THOUGHT + PREAMBLE + CALL, "Hm.", "I look.", [("f", '{"a": 1}')]),
        (THOUGHT + PREAMBLE + FINAL, "Hm.", "I look.\n\nHello", []),
        (THOUGHT + "<|start|>assistant" + THOUGHT + FINAL, "Hm.\n\nHm.", "Hello", []),
        # the recipient first, as templates write it; a declared name without namespace; no arguments
        (" to=functions.g<|channel|>commentary json<|message|>{}", "", "", [("g", "{}")]),
        ("<|channel|>commentary to=f<|message|> ", "", "", [("f", "{}")]),
        (THOUGHT + CALL + "<|call|>" + CALL.replace("f ", "g "), "Hm.", "", [("f", '{"a": 1}'), ("g", '{"a": 1}')]),
        # messages without text
        ("<|channel|>analysis<|message|><|end|>" + FINAL, "", "Hello", []),
        ("<|channel|>final<|message|><|end|>", "", "", []),
        # tools that the request does not declare
        ("<|channel|>analysis to=python code<|message|>1 + 1<|end|>", "1 + 1", "", []),
        ("<|channel|>commentary to=browser.open<|message|>{}", "", "{}", []),
        # tokens that models forget, and messages cut by a limit
        (THOUGHT.removesuffix("<|end|>") + FINAL, "Hm.", "Hello", []),
        (THOUGHT + "<|channel|>final<|message|>Hello", "Hm.", "Hello", []),
        (THOUGHT + "Hello", "Hm.", "Hello", []),
        (THOUGHT + "<|start|>assistant<|channel|>fin", "Hm.", "", []),
        (THOUGHT[:-3], "Hm.<|en", "", []),
        ("Hello", "", "Hello", []),
        ("t", "", "t", []),
        ("<|channel|>" + "x" * MAX_HEADER, "", "<|channel|>" + "x" * MAX_HEADER, []),
        ("<|start|>assistant" + THOUGHT + FINAL, "Hm.", "Hello", []),
    ],
)
def test_channels_become_reasoning_content_and_calls(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        found = parsed(text, pieces)
        assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)


def test_without_tools_calls_are_content_and_thoughts_may_stay() -> None:
    assert parsed(THOUGHT + CALL, tools=()) == Parsed(reasoning="Hm.", content='{"a": 1}')
    assert parsed(THOUGHT + FINAL, thoughts=False) == Parsed(content=THOUGHT + "Hello")
    assert parsed(THOUGHT[:-7], thoughts=False) == Parsed(content=THOUGHT[:-7])
    assert parsed("<|channel|>analysis<|message|><|end|>" + FINAL, thoughts=False) == Parsed(content="Hello")


@pytest.mark.parametrize(
    ("end", "text", "expected"),
    [
        ("", THOUGHT + FINAL, Parsed(reasoning="Hm.", content="Hello")),
        ("<|start|>user<|message|>Hi<|end|>", "<|start|>assistant" + THOUGHT + FINAL, Parsed("Hello", "Hm.")),
        ("<|start|>assistant<|channel|>analysis<|message|>", "Hm.<|end|>" + FINAL, Parsed("Hello", "Hm.")),
        ("<|start|>assistant<|channel|>final<|message|>", "Hello", Parsed("Hello")),
    ],
)
def test_the_end_of_the_prompt_opens_the_first_channel(end: str, text: str, expected: Parsed) -> None:
    assert parsed(text, end=end) == expected


def test_an_answer_that_is_continued_is_final() -> None:
    found = run(HarmonyParser((), new_id(), prompt_end="a long answer that", continued="a long answer that"), [" goes"])
    assert found == Parsed(content=" goes")


def test_thoughts_and_calls_go_out_while_they_are_written() -> None:
    begun = parser()
    assert begun.feed("<|channel|>analysis<|message|>We", 4) == [Reasoning("We")]
    assert begun.feed(" need<", 2) == [Reasoning(" need")]
    assert begun.feed("|end|>" + CALL[:-3], 9) == [CallStart(0, "id0", "f"), CallArguments(0, '{"a":')]
    assert begun.reasoning_tokens == 15


def test_reasoning_tokens_are_those_of_the_analysis() -> None:
    begun = parser()
    words = ["<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>", "assistant", "<|channel|>"]
    for word in [*words, "final", "<|message|>", "Hello"]:
        begun.feed(word, 1)
    assert begun.reasoning_tokens == 6


MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"]
WORDS = ["assistant", "analysis", "final", "commentary", " to=functions.f ", "json", "{}", " ", "Hm", "<|", "x" * 300]


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.lists(st.sampled_from([THOUGHT, FINAL, CALL, PREAMBLE, "<|call|>"]), max_size=5),
        st.lists(st.sampled_from(MARKERS + WORDS), max_size=25),
    ).map("".join),
    st.lists(st.integers(0, 2000), max_size=12),
    st.booleans(),
)
def test_cuts_change_nothing(text: str, cuts: list[int], thoughts: bool) -> None:
    whole = parsed(text, thoughts=thoughts)
    assert parsed(text, cut(text, cuts), thoughts=thoughts) == whole

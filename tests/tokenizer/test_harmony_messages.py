"""Conversations as templates in Harmony's format take them, with one that takes as little as gpt-oss's own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from minisgl.tokenizer.chat_template import ChatTemplates
from minisgl.tokenizer.harmony_messages import harmony_messages

TEMPLATE = """
{%- set ns = namespace(name=none) %}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for m in messages %}
  {%- if 'tool_calls' in m %}
    {%- if m.content and m.thinking %}{{ raise_exception('a thought beside content') }}{% endif %}
    {%- set call = m.tool_calls[0].function or m.tool_calls[0] %}
    {%- if m.content or m.thinking %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
    {%- endif %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- (call.arguments | tojson) + '<|call|>' }}
    {%- set ns.name = call.name %}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
  {%- else %}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""


def rendered(messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplates({"default": TEMPLATE}, {}).render(messages, None, {"reasoning_effort": None} | variables, True)


def called(*names: str) -> list[dict[str, Any]]:
    return [{"id": name, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}} for name in names]


def result(of: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": f"of {of}"}


def test_messages_of_the_model_come_back_whole() -> None:
    """A thought, content beside a call, and several calls, whose results are known by their ids."""
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": called("f", "g")}
    text = rendered([{"role": "user", "content": "Hi"}, answer, result("g"), result("f")])
    call = '<|start|>assistant to=functions.{0}<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    told = "<|start|>functions.{0} to=assistant<|channel|>commentary<|message|>of {0}<|end|>"
    assert text == (
        "<|start|>system<|message|>Reasoning: medium<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        f"{(call + told).format('f')}{(call + told).format('g')}<|start|>assistant"
    )


def test_many_calls_and_results_are_joined_in_linear_time() -> None:
    """A client may send calls that have no result, and as many results of no call."""
    calls = [{"id": f"c{number}", "function": {"name": "f"}} for number in range(4600)]
    results = [{"role": "tool", "tool_call_id": "none", "content": ""}] * 4600
    begin = time.process_time()
    turns = harmony_messages([{"role": "assistant", "tool_calls": calls}, *results])
    assert time.process_time() - begin < 0.5  # a comparison of each with each took 1.4 s
    assert len(turns) == 9200


def test_one_call_is_left_as_it_is() -> None:
    text = rendered([{"role": "assistant", "content": "", "tool_calls": called("f")}, result("other")])
    assert text.count("to=functions.f") == 1
    assert "<|start|>functions.f to=assistant<|channel|>commentary<|message|>of other" in text


def test_a_call_without_result_takes_none_of_a_later_turn() -> None:
    call = {"role": "assistant", "tool_calls": called("f")}
    messages = [call, {"role": "user", "content": "Again"}, call, result("f")]
    assert harmony_messages(messages) == messages


def test_an_answer_of_a_thought_alone() -> None:
    text = rendered([{"role": "assistant", "reasoning": "Hm.", "tool_calls": []}, {"role": "user", "content": "Hi"}])
    assert "<|start|>assistant<|message|><|end|><|start|>user<|message|>Hi<|end|>" in text


@pytest.mark.parametrize(
    ("effort", "told"),
    [("low", "low"), ("medium", "medium"), ("high", "high"), ("none", "low"), ("minimal", "low"), ("xhigh", "high")],
)
def test_efforts_are_those_that_the_models_know(effort: str, told: str) -> None:
    assert f"Reasoning: {told}<" in rendered([{"role": "user", "content": "Hi"}], reasoning_effort=effort)

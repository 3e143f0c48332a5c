"""The demo model's chat template, through transformers, which is how a server renders it."""

import pytest
from transformers import AutoTokenizer

from demo_model.case import THINK_CLOSE
from demo_model.evaluate import DEMO_FOLDER
from demo_model.render import render_prompt
from demo_model.skills import SKILLS, make_case

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather.", "parameters": {"type": "object"}},
}
TOOL_JSON = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Get the weather.", '
    '"parameters": {"type": "object"}}}'
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def render():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)

    def render(*messages, **kwargs):
        messages = [{"role": role, "content": content} if content is not None else role for role, content in messages]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)

    return render


def test_plain_messages(render):
    assert render(("system", "Be brief."), ("user", "Hi")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + NO_THOUGHT
    )


def test_no_system_prompt_is_made_up(render):
    assert render(("user", "Hi")).startswith("<|im_start|>user\nHi<|im_end|>")


def test_developer_is_system(render):
    assert render(("developer", "Be brief."), ("user", "Hi")) == render(("system", "Be brief."), ("user", "Hi"))


def test_text_parts_are_joined(render):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(("user", parts)) == render(("user", "ab"))


def test_thinking_must_be_asked_for(render):
    asked = render(("user", "Hi"), enable_thinking=True)
    assert asked.endswith("<|im_start|>assistant\n")
    assert render(("user", "Hi"), enable_thinking=False) == render(("user", "Hi")) == asked + NO_THOUGHT


def test_earlier_thoughts_are_dropped(render):
    thoughtful = f"<think>\nHm.\n{THINK_CLOSE}\n\nHello."
    shown = render(("user", "Hi"), ("assistant", thoughtful), ("user", "Bye"))
    assert shown == render(("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"))
    assert "Hm." not in shown


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tools_are_listed_in_the_system_turn(render, system):
    messages = [("user", "Hi")] if system is None else [("system", system), ("user", "Hi")]
    turn = render(*messages, tools=[TOOL, TOOL]).split("<|im_end|>")[0]
    assert turn.startswith("<|im_start|>system\n" + ("" if system is None else "Be brief.\n\n") + "# Tools\n")
    assert f"<tools>\n{TOOL_JSON}\n{TOOL_JSON}\n</tools>" in turn


def test_members_of_a_tool_that_were_not_learned_are_not_shown(render):
    """A tool in any order and with $schema in front, as zod writes it, looks as in training."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    }
    learned = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": parameters}}
    foreign = {"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": False}
    made = {
        "function": {
            "strict": True,
            "parameters": {**foreign, **dict(reversed(parameters.items()))},
            "description": "Tells.",
            "name": "weather",
        },
        "type": "function",
    }
    assert render(("user", "Hi"), tools=[made]) == render(("user", "Hi"), tools=[learned])


@pytest.mark.parametrize("arguments", ['{"city": "Kyōto"}', {"city": "Kyōto"}])
def test_calls_and_responses(render, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    shown = render(
        ("user", "Weather?"),
        ({"role": "assistant", "content": None, "tool_calls": [call, call]}, None),
        ("tool", "sunny"),
        ("tool", "rainy"),
    )
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kyōto"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n" in shown
    response = "\n<tool_response>\n{}\n</tool_response>"
    assert f"<|im_start|>user{response.format('sunny')}{response.format('rainy')}<|im_end|>\n" in shown


@pytest.mark.parametrize("skill", SKILLS)
def test_training_renders_the_same(skill):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    for case in (make_case(skill, number) for number in range(20)):
        if case.prompt is None:
            assert render_prompt(case) == tokenizer.apply_chat_template(
                case.messages,
                tools=case.tools,
                tokenize=False,
                add_generation_prompt=True,
                **case.chat_template_kwargs,
            )

"""The setting of a question: a system prompt, useless tools, earlier turns on other matters.

A setting never changes the right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from demo_model.case import Case, Message
from demo_model.skills import arithmetic, copying, counting, product, spelling, tool_call, unknown, weekdays
from demo_model.source import Source

_SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are the demo model of Minisgl.",
    "You are a helpful and honest assistant.",
    "Answer briefly.",
    "Be polite and brief.",
    "You are a friendly assistant. Answer the user's questions.",
    "You are a small language model.",
    "You are an assistant that answers exactly what is asked.",
    "Today is a nice day.",
]

# Questions of one message and no context, fit for earlier turns.
SIMPLE: list[Callable[[Source], Case]] = [
    product.generate,
    copying.generate,
    arithmetic.generate,
    counting.generate,
    weekdays.generate,
    spelling.generate,
    unknown.simple,
]


def with_setting(source: Source, case: Case, *, turns: int = 2) -> Case:
    """The case, half of the time as it is, else amid things that do not matter; up to `turns` earlier turns."""
    if case.prompt is not None or source.chance(0.4):
        return case
    messages = list(case.messages)
    has_system = messages[0]["role"] == "system"
    if not has_system and source.chance(0.25):
        messages = [*_earlier(source, source.integer(1, turns)), *messages]
    elif has_system and source.chance(0.2):
        messages = [messages[0], *_earlier(source, source.integer(1, turns)), *messages[1:]]
    if not has_system and source.chance(0.6):
        messages = [{"role": "system", "content": _system_prompt(source)}, *messages]
    tools = case.tools
    if tools is None and source.chance(0.15):
        tools = tool_call.random_tools(source)
    kwargs = dict(case.chat_template_kwargs)
    if "enable_thinking" not in kwargs and source.chance(0.15):
        kwargs["enable_thinking"] = False
    return replace(case, messages=messages, tools=tools, chat_template_kwargs=kwargs)


def _system_prompt(source: Source) -> str:
    if source.chance(0.7):
        return source.pick(_SYSTEM_PROMPTS)
    text = source.filler(source.log_uniform(40, max(source.context * 0.8, 41)))
    return f"{source.pick(_SYSTEM_PROMPTS)} {text}" if source.chance(0.5) else text


def _earlier(source: Source, count: int) -> list[Message]:
    messages: list[Message] = []
    for _ in range(count):
        case = source.pick(SIMPLE)(source)
        messages += [*case.messages, {"role": "assistant", "content": case.answer}]
    return messages

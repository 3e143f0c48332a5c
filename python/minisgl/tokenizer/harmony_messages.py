"""Conversations for chat templates in OpenAI's Harmony format (gpt-oss), which take fewer forms than clients send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minisgl.message.to_tokenizer import ConversationMessage
from minisgl.parsers.harmony import SHOWN_BY

_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # effort unknown to the models -> nearest


def is_harmony(template: str) -> bool:
    """Return True if a chat template writes Harmony's channels."""
    return SHOWN_BY in template


def harmony_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's variables with the nearest reasoning_effort that the models know: low, medium or high."""
    effort = kwargs.get("reasoning_effort")
    nearest = _EFFORTS.get(effort) if isinstance(effort, str) else None
    return dict(kwargs) if nearest is None else {**kwargs, "reasoning_effort": nearest}


def harmony_messages(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Return messages that have at most one call, followed by its result, and either reasoning or content beside it.

    Harmony's templates show only the first call of a message, attribute a result to the call before it, and refuse
    reasoning together with content, so the two are joined. They also fail on an answer without content and on an empty
    list of calls.
    """
    return list(_in_turns(messages))


def _in_turns(messages: list[ConversationMessage]) -> Iterator[ConversationMessage]:
    moved: set[int] = set()  # results that have been moved after their call
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if index in moved:
            continue
        if message.get("role") != "assistant":
            yield message
            continue
        if not calls:
            yield {"content": "", **{key: value for key, value in message.items() if key != "tool_calls"}}
            continue
        rest = _joined(message)
        results = _results_after(messages, index)
        for call in calls:
            yield {**rest, "tool_calls": [call]}
            rest = {"role": "assistant"}
            result = results.get(call.get("id"))
            if result is not None and result not in moved:
                moved.add(result)
                yield messages[result]


def _joined(message: ConversationMessage) -> ConversationMessage:
    reasoning, content = message.get("thinking"), message.get("content")
    if not (reasoning and content):
        return message
    return {**message, "thinking": f"{reasoning}\n\n{content}", "content": ""}


def _results_after(messages: Sequence[ConversationMessage], index: int) -> dict[str, int]:
    """Return the index of the first result of each call, by the call's id, of those directly after message `index`."""
    found: dict[str, int] = {}
    for place in range(index + 1, len(messages)):
        if messages[place].get("role") != "tool":
            break
        number = messages[place].get("tool_call_id")
        if number is not None:
            found.setdefault(number, place)
    return found

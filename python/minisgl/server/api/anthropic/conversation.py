"""Messages of Anthropic's API in OpenAI's form.

A message of blocks becomes one of text, with a thought and tool calls beside it, and one for each tool's result.
Messages of one role that follow each other are one turn, as Anthropic has it: chat templates want roles to take turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minisgl.core import InvalidRequest
from minisgl.server.api.bodies.conversation import Message, member, optional_member

Block = dict[str, Any]

BILLING_HEADER = "x-anthropic-billing-header"  # Claude Code's, in the system prompt: each request has another
ERROR_PREFIX = "Error: "  # of a result with is_error, for which chat templates have no word
SUPPORTED = "only text, thinking, tool_use and tool_result blocks are supported"


@dataclass(slots=True)
class Turn:
    """One message of OpenAI's, while it is put together."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None  # of the call whose result it is

    def message(self) -> Message:
        found: Message = {"role": self.role, "content": "\n".join(self.texts)}
        if self.thoughts:
            found["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            found["tool_calls"] = self.calls
        if self.call_id is not None:
            found["tool_call_id"] = self.call_id
        return found


def chat_messages(system: Any, messages: list[dict[str, Any]]) -> list[Message]:
    """Return a conversation in OpenAI's form; InvalidRequest naming the first field that is wrong."""
    turns: list[Turn] = []
    texts = [text for text in _texts(system, "system") if not text.startswith(BILLING_HEADER)]
    if texts:
        turns.append(Turn("system", texts))
    for index, message in enumerate(messages):
        for turn in _turns(message, f"messages.{index}"):
            if turns and turn.role == turns[-1].role != "tool":
                turns[-1].texts += turn.texts
                turns[-1].thoughts += turn.thoughts
                turns[-1].calls += turn.calls
            else:
                turns.append(turn)
    if turns[-1].calls:
        path = f"messages.{len(messages) - 1}"
        raise InvalidRequest(path, f"{path}: a message with tool_use must be followed by its tool_result")
    return [turn.message() for turn in turns]


def _turns(message: dict[str, Any], path: str) -> Iterator[Turn]:
    content_path = f"{path}.content"
    match message.get("role"):
        case "user":
            yield from _user_turns(_blocks(message.get("content"), content_path))
        case "assistant":
            yield _assistant_turn(_blocks(message.get("content"), content_path))
        case "system":
            yield Turn("system", _texts(message.get("content"), content_path))
        case _:
            raise InvalidRequest(f"{path}.role", f"{path}.role must be user, assistant or system")


def _blocks(content: Any, path: str) -> list[tuple[Block, str]]:
    """Return the blocks of a content, each with its path."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)]
    if not isinstance(content, list):
        raise InvalidRequest(path, f"{path} must be a string or a list of blocks")
    blocks = []
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidRequest(f"{path}.{index}", f"{path}.{index} must be an object with a type")
        member(block, "type", str, f"{path}.{index}")
        blocks.append((block, f"{path}.{index}"))
    return blocks


def _texts(content: Any, path: str) -> list[str]:
    """Return the texts of a content that has nothing else."""
    return [] if content is None else [_text(block, where) for block, where in _blocks(content, path)]


def _text(block: Block, path: str) -> str:
    if block["type"] != "text":
        raise _not_supported(block, path, "only text blocks are supported here")
    return member(block, "text", str, path)


def _not_supported(block: Block, path: str, supported: str) -> InvalidRequest:
    return InvalidRequest(f"{path}.type", f"{path}.type: {supported}, not {block['type']!r:.80}")


def _user_turns(blocks: list[tuple[Block, str]]) -> Iterator[Turn]:
    """Return a turn for each result, and one for the texts between them."""
    texts: list[str] = []
    for block, path in blocks:
        match block["type"]:
            case "text":
                texts.append(_text(block, path))
            case "tool_result":
                if texts:
                    yield Turn("user", texts)
                    texts = []
                yield _result(block, path)
            case _:
                raise _not_supported(block, path, SUPPORTED)
    if texts or not blocks:
        yield Turn("user", texts)


def _result(block: Block, path: str) -> Turn:
    call_id = member(block, "tool_use_id", str, path)
    texts = _texts(block.get("content"), f"{path}.content")
    if optional_member(block, "is_error", bool, path):
        texts = [ERROR_PREFIX + "\n".join(texts)]
    return Turn("tool", texts, call_id=call_id)


def _assistant_turn(blocks: list[tuple[Block, str]]) -> Turn:
    turn = Turn("assistant")
    for block, path in blocks:
        match block["type"]:
            case "text":
                turn.texts.append(_text(block, path))
            case "thinking":
                turn.thoughts.append(member(block, "thinking", str, path))
            case "redacted_thinking":  # for Anthropic's eyes only
                continue
            case "tool_use":
                turn.calls.append(_call(block, path))
            case _:
                raise _not_supported(block, path, SUPPORTED)
    return turn


def _call(block: Block, path: str) -> dict[str, Any]:
    arguments = json.dumps(member(block, "input", dict, path), ensure_ascii=False)
    function = {"name": member(block, "name", str, path), "arguments": arguments}
    return {"id": member(block, "id", str, path), "type": "function", "function": function}

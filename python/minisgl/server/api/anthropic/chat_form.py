"""Translates a body of /v1/messages into one of /v1/chat/completions: its fields and its messages.

A message of blocks becomes a message of text, with its reasoning and tool calls, and a message for each tool's result.
Successive messages of one role become one, as Anthropic defines it: chat templates want roles to alternate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.limits import Limits
from minisgl.message.to_tokenizer import ConversationMessage
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.anthropic.bodies import AnthropicBody, MessagesBody, OutputFormat
from minisgl.server.api.bodies.read_body import validate
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.http.errors import under_clients_names
from minisgl.tokenizer.conversation import member, optional_member

Block = dict[str, Any]

# Begins a text that Claude Code adds to the system prompt. It differs in each request, so no prefix would be cached.
BILLING_HEADER = "x-anthropic-billing-header"
ERROR_PREFIX = "Error: "  # marks a result with is_error, a field that chat templates do not know
SUPPORTED = "only text, thinking, tool_use and tool_result blocks are supported"
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}  # our name of a field -> the client's
SAME = ("temperature", "top_k", "top_p", "max_tokens", "stream", "cache_salt", "request_id", "priority")


def chat_body(body: AnthropicBody, limits: Limits, sampling_defaults: Mapping[str, Any]) -> ChatBody:
    """Return the equivalent chat body; InvalidRequest naming the client's field that is wrong."""
    messages = chat_messages(body.system, body.messages)
    fields: dict[str, Any] = dict(sampling_defaults)
    fields |= {
        "messages": messages,
        "continue_final_message": messages[-1]["role"] == "assistant",
        "chat_template_kwargs": _template_kwargs(body),
    }
    if (form := _format(body)) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesBody):
        fields["stop"] = body.stop_sequences
        fields |= {name: value for name in SAME if (value := getattr(body, name)) is not None}
    with under_clients_names(NAMES):
        return validate(fields, ChatBody, limits)


def _template_kwargs(body: AnthropicBody) -> dict[str, Any]:
    """Return the chat template's variables about reasoning, under the names that templates use.

    A client that does not ask for reasoning gets none, as from Anthropic, if the template can turn it off.
    """
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    told: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    effort = None if body.output_config is None else body.output_config.effort
    if thinks and effort is not None:
        told["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return told | body.chat_template_kwargs


def _format(body: AnthropicBody) -> OutputFormat | None:
    config = body.output_config
    return body.output_format if config is None or config.format is None else config.format


# Messages.


@dataclass(slots=True)
class Turn:
    """Message in OpenAI's form, while it is put together."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None  # id of the call whose result it is

    def message(self) -> ConversationMessage:
        found: ConversationMessage = {"role": self.role, "content": "\n".join(self.texts)}
        if self.reasoning:
            found["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            found["tool_calls"] = self.calls
        if self.call_id is not None:
            found["tool_call_id"] = self.call_id
        return found


def chat_messages(system: Any, messages: list[dict[str, Any]]) -> list[ConversationMessage]:
    """Return a conversation in OpenAI's form; InvalidRequest naming the first field that is wrong."""
    turns: list[Turn] = []
    texts = [text for text in _texts(system, "system") if not text.startswith(BILLING_HEADER)]
    if texts:
        turns.append(Turn("system", texts))
    for index, message in enumerate(messages):
        for turn in _turns(message, f"messages.{index}"):
            if turns and turn.role == turns[-1].role != "tool":
                turns[-1].texts += turn.texts
                turns[-1].reasoning += turn.reasoning
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
    """Return the blocks of a message's content, each with its path."""
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
    """Return the texts of a content that must have text blocks only."""
    return [] if content is None else [_text(block, where) for block, where in _blocks(content, path)]


def _text(block: Block, path: str) -> str:
    if block["type"] != "text":
        raise _not_supported(block, path, "only text blocks are supported here")
    return member(block, "text", str, path)


def _not_supported(block: Block, path: str, supported: str) -> InvalidRequest:
    return InvalidRequest(f"{path}.type", f"{path}.type: {supported}, not {block['type']!r:.80}")


def _user_turns(blocks: list[tuple[Block, str]]) -> Iterator[Turn]:
    """Yield a turn for each tool result, and one for the texts between two results."""
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
                turn.reasoning.append(member(block, "thinking", str, path))
            case "redacted_thinking":  # encrypted by Anthropic
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

"""Input items of a response, as the messages of a conversation.

An assistant's turn consists of several items: reasoning, a text, calls. They become one message, which ends before a
call's output or a message of another role.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from minisgl.message.to_tokenizer import ConversationMessage
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.route_bodies import MAX_MESSAGES
from minisgl.server.api.responses.body import Item
from minisgl.server.api.responses.tools import shown_name
from minisgl.tokenizer.conversation import content_text, member, optional_member

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {  # type of a content part -> name of its text field
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
REFERENCE = "item_reference"
_SEALED = "minisgl:"


def seal(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, because many clients send that back without the reasoning's text.

    It is encoded, not encrypted: the client has seen the text.
    """
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str:
    """Return the reasoning of a `seal`, or "" if another server made it."""
    if not content.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def messages_of(items: Sequence[Item], paths: Sequence[str]) -> list[ConversationMessage]:
    """Return the items as messages; InvalidRequest naming the first field that is wrong, below its item's path."""
    if not items:
        raise InvalidRequest("input", "input must have at least one item")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest("input", f"input must have at most {MAX_MESSAGES} items, not {len(items)}")
    conversation = _Conversation()
    for item, path in zip(items, paths, strict=True):
        optional_member(item, "id", str, path)
        match item_type(item, path):
            case "message":
                conversation.add_message(item, path)
            case "reasoning":
                conversation.add_reasoning(item, path)
            case "function_call":
                conversation.add_call(item, path)
            case "function_call_output":
                conversation.add_output(item, path)
            case kind:
                raise InvalidRequest(f"{path}.type", f"{path}.type: items of the type {kind!r:.80} are not supported")
    conversation.end()
    return conversation.messages


def kept_items(items: Sequence[Item], number: str) -> list[Item]:
    """Return a response's input as it is stored and listed: each item has an id, and a message's content is parts.

    `number` is the part of the response's id that the ids of its items share.
    """
    return [_kept(item, f"_{number}_i{index}") for index, item in enumerate(items)]


def _kept(item: Item, id_end: str) -> Item:
    kind = item.get("type") or "message"
    if kind != "message":
        return {**item, "id": item.get("id") or PREFIXES.get(kind, "item") + id_end}
    content = item["content"]
    if isinstance(content, str):
        content = [{"type": "output_text" if item["role"] == "assistant" else "input_text", "text": content}]
    given = {name: value for name, value in item.items() if value is not None and value != ""}
    return {"id": f"msg{id_end}", "type": kind, "status": "completed", **given, "content": content}


def item_type(item: Item, path: str) -> str:
    """Return the type of an item, which a message may leave out; InvalidRequest if another item does."""
    kind = optional_member(item, "type", str, path)
    if kind is None and "role" in item:
        return "message"
    if kind is None:
        raise InvalidRequest(f"{path}.type", f"{path}.type must be a string")
    return kind


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[ConversationMessage] = []
        self._turn: ConversationMessage | None = None  # message of the assistant that the next item may extend
        self._reasoning: list[str] = []  # texts of its reasoning, which are joined at its end

    def add_message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise InvalidRequest(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}")
        text = content_text(item.get("content"), f"{path}.content", TEXT_PARTS)
        if role == "assistant":
            self._open_turn("content", "tool_calls")["content"] = text
        else:
            self._end_turn({"role": role, "content": text})

    def add_reasoning(self, item: Item, path: str) -> None:
        content, summary = (
            content_text(item.get(name) or "", f"{path}.{name}", TEXT_PARTS) for name in ("content", "summary")
        )
        sealed = optional_member(item, "encrypted_content", str, path) or ""
        if reasoning := content or unseal(sealed) or summary:
            self._open_turn("content", "tool_calls")
            self._reasoning.append(reasoning)

    def add_call(self, item: Item, path: str) -> None:
        function = {"name": shown_name(item, path), "arguments": member(item, "arguments", str, path)}
        call = {"id": member(item, "call_id", str, path), "type": "function", "function": function}
        self._open_turn().setdefault("tool_calls", []).append(call)

    def add_output(self, item: Item, path: str) -> None:
        text = content_text(item.get("output"), f"{path}.output", TEXT_PARTS)
        self._end_turn({"role": "tool", "tool_call_id": member(item, "call_id", str, path), "content": text})

    def _open_turn(self, *endings: str) -> ConversationMessage:
        """Return the assistant's current message, or a new one if it has any of the fields `endings`."""
        if self._turn is None or any(name in self._turn for name in endings):
            self.end()
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn

    def _end_turn(self, message: ConversationMessage) -> None:
        self.end()
        self.messages.append(message)

    def end(self) -> None:
        """End the assistant's current message, if any."""
        if self._turn is not None and self._reasoning:
            self._turn["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning = []
        self._turn = None

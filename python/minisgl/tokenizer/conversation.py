"""Messages of a conversation: from OpenAI's form to the form that chat templates expect.

OpenAI's older form of a call and its result, `function_call` and the role `function`, becomes a tool call and a tool
result. Errors name nested fields by their path.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

from minisgl.message.to_tokenizer import ConversationMessage
from minisgl.sampling_params import InvalidRequest

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # fields of a message's reasoning, by precedence
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a content part -> where its text is
_NOUNS: dict[type, str] = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}


def optional_member(owner: Mapping[str, Any], name: str, kind: type[T], path: str) -> T | None:
    """Return a member of the object at `path`, or None; InvalidRequest naming it if it is of another type."""
    value = owner.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{path}.{name}", f"{path}.{name} must be {_NOUNS[kind]}")
    return value


def member(owner: Mapping[str, Any], name: str, kind: type[T], path: str) -> T:
    """Return a member that must be there, as `optional_member`."""
    value = optional_member(owner, name, kind, path)
    if value is None:
        raise InvalidRequest(f"{path}.{name}", f"{path}.{name} must be {_NOUNS[kind]}")
    return value


def template_messages(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Return all messages for the template; InvalidRequest naming the first field that is wrong."""
    return [template_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def template_message(message: ConversationMessage, path: str) -> ConversationMessage:
    """Return a message in the form of chat templates: its content is one string, and nothing in it is null."""
    message = with_tool_calls(message, path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}")
    changed: ConversationMessage = {"tool_calls": None}
    strings = ["name"]
    if role == "assistant":
        strings += [*REASONING_NAMES, "refusal"]
        if message.get("audio") is not None:
            raise InvalidRequest(f"{path}.audio", f"{path}.audio is not supported: send its text as content")
        if message.get("tool_calls"):
            calls = member(message, "tool_calls", list, path)
            changed["tool_calls"] = [
                _template_call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(calls)
            ]
    elif role == "tool":
        strings.append("tool_call_id")
    for name in strings:
        optional_member(message, name, str, path)
    changed["content"] = _content(message, path)
    return {key: value for key, value in (message | changed).items() if value is not None}


def with_tool_calls(message: ConversationMessage, path: str) -> ConversationMessage:
    """Return a message of OpenAI's older form (a function's call or result) in today's form, others unchanged."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": _call_id(member(message, "name", str, path))}
    call = message.get("function_call")
    if call is None or message.get("role") != "assistant":
        return message
    path = f"{path}.function_call"
    if message.get("tool_calls"):
        raise InvalidRequest(path, f"{path} and tool_calls cannot be given together")
    call_id = _call_id(member(call if isinstance(call, dict) else {}, "name", str, path))
    optional_member(call, "arguments", str, path)
    return {**message, "function_call": None, "tool_calls": [{"id": call_id, "type": "function", "function": call}]}


def _call_id(name: str) -> str:
    """Return the id of a call in the older form, where the result has only the function's name.

    Some templates accept only ids of nine digits.
    """
    return f"{zlib.crc32(name.encode()) % 10**9:09}"


def _content(message: ConversationMessage, path: str) -> str:
    content = message.get("content")
    if content is None:
        others = ("tool_calls", "refusal", *REASONING_NAMES)
        if message["role"] != "assistant" or not any(message.get(name) for name in others):
            raise InvalidRequest(f"{path}.content", f"{path}.content is required")
        return message.get("refusal") or ""
    return content_text(content, f"{path}.content", TEXT_PARTS)


def content_text(content: Any, path: str, text_parts: Mapping[str, str]) -> str:
    """Return content as one text: a string, or text parts joined by newlines; InvalidRequest naming a wrong part.

    `text_parts` maps the type of a part to the name of its text field.
    """
    if isinstance(content, list):
        parts = [_text_of_part(part, f"{path}.{index}", text_parts) for index, part in enumerate(content)]
        return "\n".join(parts)
    if not isinstance(content, str):
        raise InvalidRequest(path, f"{path} must be a string or a list of text parts")
    return content


def _text_of_part(part: Any, path: str, text_parts: Mapping[str, str]) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(path, f"{path} must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in text_parts:
        raise InvalidRequest(f"{path}.type", f"{path}.type: only text parts are supported, not {kind!r:.80}")
    return member(part, text_parts[kind], str, path)


def _template_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidRequest(path, f"{path} must be an object")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type", f"{path}.type must be 'function'")
    optional_member(call, "id", str, path)
    function = member(call, "function", dict, path)
    member(function, "name", str, f"{path}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise InvalidRequest(f"{path}.function.arguments", f"{path}.function.arguments must be a string of JSON")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or "{}"}}

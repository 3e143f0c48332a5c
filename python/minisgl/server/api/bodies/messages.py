"""The messages of a conversation: from OpenAI's form to that of chat templates."""

from __future__ import annotations

from typing import Any

from minisgl.core import InvalidRequest
from minisgl.server.api.bodies.functions import with_tool_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a content part -> where its text is

Message = dict[str, Any]


def template_messages(messages: list[Message]) -> list[Message]:
    """All messages, or InvalidRequest naming the first field that is wrong."""
    return [template_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def template_message(message: Message, path: str) -> Message:
    """A message as chat templates know it: one string of content, and nothing that is null or empty."""
    message = with_tool_calls(message, path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}")
    changed: Message = {"tool_calls": None}
    if role == "assistant":
        _check_assistant(message, path)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = _template_calls(calls, f"{path}.tool_calls")
    elif role == "tool":
        _check_string(message, "tool_call_id", path)
    _check_string(message, "name", path)
    changed["content"] = _content(message, path)
    return {key: value for key, value in (message | changed).items() if value is not None}


def _check_assistant(message: Message, path: str) -> None:
    for name in (*REASONING_NAMES, "refusal"):
        _check_string(message, name, path)
    if message.get("audio") is not None:
        raise InvalidRequest(f"{path}.audio", f"{path}.audio is not supported: send its text as content")


def _check_string(message: Message, name: str, path: str) -> None:
    if not isinstance(message.get(name), (str, type(None))):
        raise InvalidRequest(f"{path}.{name}", f"{path}.{name} must be a string")


def _content(message: Message, path: str) -> str:
    content = message.get("content")
    if content is None:
        others = ("tool_calls", "refusal", *REASONING_NAMES)
        if message["role"] != "assistant" or not any(message.get(name) for name in others):
            raise InvalidRequest(f"{path}.content", f"{path}.content is required")
        return message.get("refusal") or ""
    if isinstance(content, list):
        return "\n".join([_text_of_part(part, f"{path}.content.{index}") for index, part in enumerate(content)])
    if not isinstance(content, str):
        raise InvalidRequest(f"{path}.content", f"{path}.content must be a string or a list of text parts")
    return content


def _text_of_part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(path, f"{path} must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidRequest(f"{path}.type", f"{path}.type: only text parts are supported, not {kind!r:.80}")
    name = TEXT_PARTS[kind]
    text = part.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{name}", f"{path}.{name} must be a string")
    return text


def _template_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(path, f"{path} must be a list")
    return [_template_call(call, f"{path}.{index}") for index, call in enumerate(calls)]


def _template_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidRequest(path, f"{path} must be an object")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type", f"{path}.type must be 'function'")
    _check_string(call, "id", path)
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.function", f"{path}.function must be an object")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.function.name", f"{path}.function.name must be a string")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise InvalidRequest(f"{path}.function.arguments", f"{path}.function.arguments must be a string of JSON")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or "{}"}}

"""POST /v1/chat/completions: from its body to a job, and from what the engine gives to its answer."""

from __future__ import annotations

import time
import uuid
from typing import Any

from msgspec import UNSET
from msgspec.json import encode

from minisgl.core import InvalidRequest, Limits
from minisgl.message.to_tokenizer import ChatPrompt
from minisgl.server.api.client import Delta, Job, OpenRequest
from minisgl.server.api.errors import invalid_request
from minisgl.server.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Usage,
    server_sent_event,
)
from minisgl.server.api.schema import ChatBody

ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_job(body: ChatBody, limits: Limits) -> Job:
    """What the body asks of the engine; InvalidRequest or ApiError if that is not possible."""
    limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    field_names = {"prompt": "messages", "max_tokens": limit_field}
    try:
        sampling = body.sampling(limits)
    except InvalidRequest as error:
        raise invalid_request(error, field_names) from None
    messages = [template_message(message, f"messages.{index}") for index, message in enumerate(body.messages)]
    tools = template_tools(body.tools) if body.tools and body.tool_choice != "none" else None
    prompt = ChatPrompt(messages, tools, body.chat_template_kwargs)
    return Job(
        [prompt],
        body.n,
        sampling,
        body.text_options(),
        body.priority,
        field_names,
        truncate=body.truncation(limits),
        cache_salt=body.cache_salt or "",
    )


def template_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    """A message as chat templates know it: one string of content, no nulls, and the system's voice is `system`."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise InvalidRequest(f"{path}.content", f"{path}.content is required")
        content = ""
    elif isinstance(content, list):
        content = "\n".join([_text_of_part(part, f"{path}.content.{index}") for index, part in enumerate(content)])
    elif not isinstance(content, str):
        raise InvalidRequest(f"{path}.content", f"{path}.content must be a string or a list of text parts")
    # Few templates know OpenAI's newer name, and those that do not would drop the message without a word.
    changed = {"role": "system" if role == "developer" else role, "content": content}
    return {key: value for key, value in (message | changed).items() if value is not None}


def _text_of_part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(path, f"{path} must be an object with a type")
    if part.get("type") != "text":
        raise InvalidRequest(
            f"{path}.type", f"{path}.type: only text parts are supported, not {part.get('type')!r:.80}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text", f"{path}.text must be a string")
    return text


def template_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each a named function."""
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if tool.get("type") != "function":
            raise InvalidRequest(f"{path}.type", f"{path}.type must be 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{path}.function", f"{path}.function must be an object")
        if not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{path}.function.name", f"{path}.function.name must be a string")
    return tools


class ChatWriter:
    """Writes chat.completion objects, and chat.completion.chunk events."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._begun: set[int] = set()  # choices whose role has left

    def begin(self, request: OpenRequest) -> None:
        """It needs nothing of them."""

    def events(self, delta: Delta) -> bytes:
        data = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            data = self._event(ChatChunkChoice(delta.index, ChatDelta(role="assistant", content="")))
        if text := delta.text:
            data += self._event(ChatChunkChoice(delta.index, ChatDelta(content=text)))
        if delta.finish is not None:
            data += self._event(ChatChunkChoice(delta.index, ChatDelta(), delta.finish, delta.stop_reason))
        return data

    def _event(self, choice: ChatChunkChoice) -> bytes:
        usage = None if self._include_usage else UNSET
        return server_sent_event(ChatChunk(self.id, self._created, self._model, [choice], usage))

    def last_events(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return server_sent_event(ChatChunk(self.id, self._created, self._model, [], usage))

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        written = [
            ChatChoice(choice.index, ChatMessage(choice.text), choice.finish, choice.stop_reason) for choice in choices
        ]
        return encode(ChatCompletion(self.id, self._created, self._model, written, usage))

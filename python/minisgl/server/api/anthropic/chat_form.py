"""A body of /v1/messages in the words of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.limits import Limits
from minisgl.server.api.anthropic.bodies import ConversationBody, MessagesBody, OutputFormat
from minisgl.server.api.anthropic.conversation import chat_messages
from minisgl.server.api.bodies.body import validate
from minisgl.server.api.bodies.schema import ChatBody
from minisgl.server.api.http.errors import under_clients_names

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}  # ours -> the client's
SAME = ("temperature", "top_k", "top_p", "max_tokens", "stream", "cache_salt", "request_id", "priority")


def chat_body(body: ConversationBody, limits: Limits, sampling_defaults: Mapping[str, Any]) -> ChatBody:
    """Return the body that asks the same; InvalidRequest or ApiError naming the client's field that is wrong."""
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


def _template_kwargs(body: ConversationBody) -> dict[str, Any]:
    """Return what the chat template is told of thoughts, under the names that templates use.

    A client that asks for none gets none, as from Anthropic, where the template can prevent them.
    """
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    told: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    effort = None if body.output_config is None else body.output_config.effort
    if thinks and effort is not None:
        told["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return told | body.chat_template_kwargs


def _format(body: ConversationBody) -> OutputFormat | None:
    config = body.output_config
    return body.output_format if config is None or config.format is None else config.format

"""Bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from minisgl.request_fields import RequestField, request_fields
from minisgl.sampling_params import SamplingParams
from minisgl.server.api.bodies.request_body import EMPTY, NEVER, STRING, Body, CacheSalt, Priority, RequestId, any_of
from minisgl.server.api.bodies.route_bodies import MAX_MESSAGES, Temperature, TemplateKwargs
from minisgl.structured_output.response_format import Options

SAMPLING = request_fields(SamplingParams)

OBJECTS = {"type": "array", "items": {"type": "object"}}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": {"anyOf": [STRING, OBJECTS]}},
}


class Thinking(Options):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = Field(
        description="disabled: the chat template asks for no reasoning; the others: it asks for one.",
        examples=["enabled"],
    )
    budget_tokens: int | None = Field(default=None, description="no effect", examples=[1024])
    display: str | None = Field(default=None, description="no effect", examples=["summarized"])


class OutputFormat(Options):
    type: Literal["json_schema"] = Field(description="The only one.")
    schema_: dict[str, Any] = Field(
        alias="schema", description="JSON Schema that the answer follows.", examples=[{"type": "object"}]
    )


class OutputConfig(Options):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Given to the chat template of a model that thinks.", examples=["low"]
    )
    format: OutputFormat | None = Field(default=None, description="Form that the answer must have.")


class AnthropicBody(Body):
    """Fields of both routes, which make the prompt."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": EMPTY,
        "fallbacks": EMPTY,
        "thread": NEVER,
    }
    no_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "billing_policy",
            "cache_control",
            "compaction",
            "container",
            "context_management",
            "diagnostics",
            "fallback_credit_token",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )

    messages: Annotated[
        list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]],
        RequestField(
            "The conversation, oldest message first; an assistant's at the end is continued.",
            [{"role": "user", "content": "What is the capital of France?"}],
            min_length=1,
            max_length=MAX_MESSAGES,
            noun="messages",
        ),
    ]
    system: Annotated[
        Any, any_of(STRING, OBJECTS), RequestField("The system prompt: a text, or text blocks.", "Answer briefly.")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        RequestField(
            "Tools that the model may call; those that Anthropic defines are ignored.",
            [{"name": "now", "input_schema": {"type": "object"}}],
        ),
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None,
        RequestField("Its type is auto, any, tool (with a name) or none; disable_parallel_tool_use.", {"type": "auto"}),
    ] = None
    thinking: Annotated[
        Thinking | None, RequestField("Given to the chat template; none: no reasoning.", {"type": "adaptive"})
    ] = None
    output_config: Annotated[
        OutputConfig | None, RequestField("Reasoning effort, and the form of the answer.", {"effort": "low"})
    ] = None
    output_format: Annotated[
        OutputFormat | None,
        RequestField("Older name of output_config.format.", {"type": "json_schema", "schema": {"type": "object"}}),
    ] = None
    chat_template_kwargs: TemplateKwargs = Field({})


class CountTokensBody(AnthropicBody):
    """POST /v1/messages/count_tokens"""

    example_fields: ClassVar[tuple[str, ...]] = ("messages",)


class MessagesBody(AnthropicBody):
    """POST /v1/messages"""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**AnthropicBody.not_supported, "compaction": NEVER}
    no_effect: ClassVar[frozenset[str]] = AnthropicBody.no_effect - {"compaction"}
    example_fields: ClassVar[tuple[str, ...]] = ("messages", "max_tokens")

    max_tokens: Annotated[int, RequestField("Most tokens to generate; fewer if the context holds no more.", 64, ge=1)]
    temperature: Annotated[float | None, Temperature] = None
    top_k: Annotated[int | None, SAMPLING["top_k"]] = None
    top_p: Annotated[float | None, SAMPLING["top_p"]] = None
    stop_sequences: Annotated[list[str], SAMPLING["stop"]] = Field([])
    stream: Annotated[
        bool, RequestField("Answer as server-sent events, from message_start to message_stop.", False)
    ] = False
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    priority: Priority = 0

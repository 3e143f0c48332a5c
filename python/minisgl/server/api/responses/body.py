"""Body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from minisgl.request_fields import RequestField
from minisgl.server.api.bodies.request_body import NEVER, OFF, STRING, RequestBody, any_of
from minisgl.server.api.bodies.route_bodies import (
    ParallelToolCalls,
    ReasoningEffort,
    Temperature,
    TemplateKwargs,
    ToolChoice,
)
from minisgl.structured_output.response_format import Options

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_REASONING = "reasoning.encrypted_content"

Item = dict[str, Any]
_ITEM = {
    "type": "object",
    "properties": {
        "type": STRING,
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "call_id": STRING,
        "name": STRING,
        "namespace": STRING,
        "arguments": STRING,
        "output": {"anyOf": [STRING, {"type": "array", "items": {"type": "object"}}]},
    },
}


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ReasoningOptions(Options):
    """Settings of how the model thinks. Summaries are not made, so `summary` has no effect."""

    effort: ReasoningEffort | None = Field(
        default=None, description="Given to the chat template; `none`: without reasoning.", examples=["low"]
    )


class TextFormat(Options):
    """Form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: anything; json_object: any object; json_schema: as the schema says.",
        examples=["json_object"],
    )
    name: str | None = Field(default=None, description="Name of the schema; no effect.", examples=["person"])
    description: str | None = Field(default=None, description="No effect.", examples=["A person."])
    strict: bool | None = Field(default=None, description="No effect: the schema is always followed.", examples=[True])
    schema_: dict[str, Any] | bool | None = Field(
        default=None, alias="schema", description="Required by the type json_schema.", examples=[{"type": "object"}]
    )


class TextSettings(Options):
    format: TextFormat | None = Field(default=None, description="Form of the answer's text.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="Given to the chat template.", examples=["medium"]
    )


class ResponsesBody(RequestBody):
    """POST /v1/responses"""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **RequestBody.not_supported,
        "background": OFF,
        "conversation": NEVER,
        "prompt": NEVER,
        "n": (1,),
    }
    no_effect: ClassVar[frozenset[str]] = RequestBody.no_effect - {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "store",
        "user",
    } | {"client_metadata", "context_management", "max_tool_calls", "stream_options"}

    example_fields: ClassVar[tuple[str, ...]] = ("input", "max_output_tokens", "temperature")

    input: Annotated[
        list[Annotated[Item, WithJsonSchema(_ITEM)]],
        BeforeValidator(_as_items),
        any_of(STRING, {"type": "array", "items": _ITEM}),
        RequestField(
            "A message of the user, or items: messages, function calls and their outputs, reasoning; may be left out "
            "after previous_response_id.",
            "What is the capital of France?",
        ),
    ] = Field([])
    instructions: Annotated[
        str | None, RequestField("System message before the input; not kept for later responses.", "Answer briefly.")
    ] = None
    previous_response_id: Annotated[
        str | None, RequestField("Response whose conversation goes on; needs --response-store.", "resp_1")
    ] = None
    store: Annotated[bool, RequestField("Keep the response, if the server runs with --response-store.", False)] = True
    max_output_tokens: Annotated[
        int | None, RequestField("Most tokens to generate, reasoning included; none: as many as fit.", 64, ge=1)
    ] = None
    max_tokens: Annotated[int | None, RequestField("Chat's name of max_output_tokens.", 64, ge=1)] = None
    temperature: Annotated[float, Temperature] = 1.0
    tools: Annotated[
        list[dict[str, Any]] | None,
        RequestField(
            "Functions that the model may call, also in namespaces; tools of other types are ignored with a warning.",
            [{"type": "function", "name": "now"}],
        ),
    ] = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: ParallelToolCalls = True
    text: Annotated[
        TextSettings | None,
        RequestField("Form of the answer: text, json_object or json_schema.", {"format": {"type": "json_object"}}),
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None,
        RequestField("How much the model reasons: its effort goes to the chat template.", {"effort": "low"}),
    ] = None
    include: Annotated[
        list[str],
        RequestField(
            f"{INCLUDE_LOGPROBS}, {INCLUDE_REASONING}; others have no effect.", ["message.output_text.logprobs"]
        ),
    ] = Field([])
    top_logprobs: Annotated[
        int | None,
        RequestField("Most likely alternatives to return with each token of the text.", 0, ge=0, le="max_logprobs"),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"],
        RequestField("auto: the oldest items are left out where the input does not fit the context.", "auto"),
    ] = "disabled"
    chat_template_kwargs: TemplateKwargs = Field({})
    metadata: Annotated[dict[str, str], RequestField("Returned with the response.", {"job": "1"})] = Field({})
    user: Annotated[str | None, RequestField("Returned with the response.", "user-1")] = None
    safety_identifier: Annotated[str | None, RequestField("Returned with the response.", "user-1")] = None
    prompt_cache_key: Annotated[str | None, RequestField("Returned with the response.", "job-1")] = None
    stream: Annotated[bool, RequestField("Answer as server-sent events, one for each change.", False)] = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs:
            return self.top_logprobs
        return 0 if INCLUDE_LOGPROBS in self.include else None

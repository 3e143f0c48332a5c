"""Body of each route.

A field is declared here or in `request_body`, or it is named in `not_supported` or `no_effect`; any other is unknown.
Errors name nested values by their dotted path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from minisgl.limits import MAX_OPENAI_TEMPERATURE
from minisgl.message.to_tokenizer import ChatPrompt, ConversationMessage
from minisgl.request_fields import TOKEN_ID, RequestField
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.read_body import MAX_ITEMS
from minisgl.server.api.bodies.request_body import (
    EMPTY,
    NEVER,
    OFF,
    STRING,
    STRINGS,
    Body,
    ExtraKey,
    Priority,
    RequestBody,
    Rid,
    Stream,
    any_of,
)
from minisgl.server.api.bodies.tools import ToolUse, function_use, tool_use
from minisgl.structured_output.response_format import Options
from minisgl.tokenizer.conversation import ROLES

MAX_MESSAGES = 8192

IDS = {"type": "array", "items": {"type": "integer"}}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": [*ROLES, "function"]},
        "content": {"anyOf": [STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": STRING,
        "name": STRING,
    },
}
_Prompt = RequestField("Text, or token ids, that the answer continues.", "The capital of France is")
_Messages = RequestField(
    "The conversation, oldest message first.",
    [{"role": "user", "content": "What is the capital of France?"}],
    min_length=1,
    max_length=MAX_MESSAGES,
    noun="messages",
)
Messages = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]], _Messages]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateKwargs = Annotated[
    dict[str, Any], RequestField("Arguments that the chat template gets by name.", {"enable_thinking": False})
]
ParallelToolCalls = Annotated[bool, RequestField("An answer may have more than one tool call.", True)]
Temperature = RequestField(
    "Randomness of the choice; below 0.00001 it is greedy.", 0.7, ge=0, le=MAX_OPENAI_TEMPERATURE
)
ToolChoice = Annotated[  # `bodies.tools` interprets it
    Any,
    any_of(STRING, {"type": "object"}),
    RequestField("none, auto, required, a function by name or allowed_tools.", "auto"),
]


class ChatReasoning(Options):
    effort: ReasoningEffort | None = Field(default=None, description="As reasoning_effort.", examples=["low"])
    enabled: bool | None = Field(default=None, description="True: with reasoning; false: without.", examples=[True])


class StreamOptions(Options):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(RequestBody):
    """Body of chat and text completions."""

    temperature: Annotated[float, Temperature] = 1.0
    n: Annotated[int, RequestField("Answers to each prompt.", 1, ge=1, le="max_choices")] = 1
    stream_options: Annotated[
        StreamOptions | None, RequestField("include_usage, continuous_usage_stats; only with stream.")
    ] = None

    def wants_usage(self) -> bool:
        """Return True if a stream ends with a usage chunk; InvalidRequest if there is no stream to end."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options", "stream_options is only allowed when stream is true")
        return bool(self.stream_options.include_usage)

    def wants_continuous_usage(self) -> bool:
        """Return True if every chunk of a stream tells the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ConversationBody(Body):
    """Fields that make a conversation's prompt, besides its messages."""

    tools: Annotated[
        list[dict[str, Any]] | None,
        RequestField("Functions that the model may call.", [{"type": "function", "function": {"name": "now"}}]),
    ] = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: ParallelToolCalls = True
    functions: Annotated[list[dict[str, Any]] | None, RequestField("Older form of tools.", [{"name": "now"}])] = None
    function_call: Annotated[
        Any, any_of(STRING, {"type": "object"}), RequestField("Older form of tool_choice; with functions.", "auto")
    ] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None, RequestField("Given to the chat template; `none`: without reasoning.", "low")
    ] = None
    reasoning: Annotated[
        ChatReasoning | None, RequestField("SGLang's form of reasoning_effort: effort, enabled.", {"effort": "low"})
    ] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, RequestField("Given to the chat template.", "low")
    ] = None
    chat_template_kwargs: TemplateKwargs = Field({})
    add_generation_prompt: Annotated[
        bool | None,
        RequestField(
            "Begin the assistant's message at the end of the prompt; none: unless the last message is continued.", True
        ),
    ] = None
    continue_final_message: Annotated[bool, RequestField("The answer continues the last message.", False)] = False

    def tool_use(self) -> ToolUse:
        """Return the meaning of the tools, in today's form or the older one; InvalidRequest naming the wrong field."""
        if not self.functions:
            if self.function_call not in (None, "none", "auto"):
                raise InvalidRequest("function_call", "function_call is only allowed when functions are given")
            return tool_use(self.tools or [], self.tool_choice, self.parallel_tool_calls)
        if self.tools:
            raise InvalidRequest("functions", "functions and tools cannot be given together")
        return function_use(self.functions, self.function_call)

    def chat_prompt(self, use: ToolUse, messages: list[ConversationMessage]) -> ChatPrompt:
        """Return the prompt for the chat template; InvalidRequest if two fields contradict each other about its end."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        generation_prompt = not self.continue_final_message and self.add_generation_prompt is not False
        return ChatPrompt(messages, use.shown, self.template_kwargs, generation_prompt, self.continue_final_message)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template: reasoning effort, under each name that templates use, and those by name."""
        found: dict[str, Any] = {} if self.verbosity is None else {"verbosity": self.verbosity}
        effort, thinks = self.reasoning_effort, None
        if self.reasoning is not None:
            effort, thinks = effort or self.reasoning.effort, self.reasoning.enabled
        if effort is not None:
            found["reasoning_effort"], thinks = effort, effort != "none"
        if thinks is not None:
            found |= {"enable_thinking": thinks, "thinking": thinks}
        return found | self.chat_template_kwargs


class ChatBody(OpenAIBody, ConversationBody):
    """POST /v1/chat/completions"""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIBody.not_supported,
        "best_of": (1,),
        "suffix": ("",),
        "audio": NEVER,
        "modalities": (["text"],),
        "web_search_options": NEVER,
        "documents": EMPTY,
        "chat_template": NEVER,
        "thinking_token_budget": NEVER,
        "input_ids": NEVER,
        "add_special_tokens": OFF,
    }

    no_effect: ClassVar[frozenset[str]] = OpenAIBody.no_effect - {"service_tier"}

    example_fields: ClassVar[tuple[str, ...]] = ("messages", "max_completion_tokens", "temperature")

    messages: Messages
    logprobs: Annotated[bool, RequestField("Return log-probabilities of the answer's tokens.", False)] = False
    top_logprobs: Annotated[
        int | None,
        RequestField("Most likely alternatives to return with each token; needs logprobs.", 0, ge=0, le="max_logprobs"),
    ] = None
    max_tokens: Annotated[int | None, RequestField("Older name of max_completion_tokens.", 64, ge=0)] = None
    max_completion_tokens: Annotated[
        int | None,
        RequestField(
            "Most tokens to generate; 0 scores the prompt alone, with prompt_logprobs; none: as many as fit.", 64, ge=0
        ),
    ] = None
    include_reasoning: Annotated[bool, RequestField("Write the reasoning (vLLM).", True)] = True
    separate_reasoning: Annotated[bool, RequestField("The reasoning is no part of the content (SGLang).", True)] = True
    echo: Annotated[bool, RequestField("The answer begins with the message that it continues.", False)] = False
    service_tier: Annotated[str | None, RequestField("Returned with the answer.", "auto", max_length=64)] = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        if not self.logprobs and self.top_logprobs != 0:
            raise InvalidRequest("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self.top_logprobs if self.logprobs else None


class CompletionBody(OpenAIBody):
    """POST /v1/completions"""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**OpenAIBody.not_supported, "suffix": ("",)}

    example_fields: ClassVar[tuple[str, ...]] = ("prompt", "max_tokens", "temperature")

    prompt: Annotated[Any, any_of(STRING, STRINGS, IDS, {"type": "array", "items": IDS}), _Prompt]
    max_tokens: int | None = 16  # OpenAI's default
    add_special_tokens: Annotated[
        bool, RequestField("Add the tokenizer's special tokens, such as BOS, to prompts that are text.", True)
    ] = True
    logprobs: int | None = None
    echo: Annotated[bool, RequestField("The answer begins with the prompt.", False)] = False
    best_of: Annotated[
        int | None, RequestField("Generate this many answers and return the n most likely.", 1, ge=1, le="max_choices")
    ] = None

    @property
    def num_choices(self) -> int:
        """Number of answers to generate, of which the best n are returned; InvalidRequest if it is not possible."""
        if self.best_of is None:
            return self.n
        if self.best_of < self.n:
            raise InvalidRequest("best_of", f"best_of must be at least n ({self.n}), not {self.best_of}")
        if self.stream and self.best_of > self.n:
            raise InvalidRequest("best_of", "best_of: a stream cannot wait for the best, so best_of must equal n")
        return self.best_of

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None and self.num_choices > self.n:
            return 0  # the best answers are chosen by their log-probabilities
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to each token of the prompt; the tokens of an echo have as many as the answer's."""
        if not self.echo:
            return self.prompt_logprobs
        asked = [number for number in (self.prompt_logprobs, self.logprobs) if number is not None]
        return max(asked, default=0 if self.max_tokens == 0 else None)


class GenerateBody(RequestBody):
    """POST /generate: one prompt, greedy unless asked otherwise."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **RequestBody.not_supported,
        "n": (1,),
        "sampling_params": EMPTY,
        "stream_options": EMPTY,
    }

    example_fields: ClassVar[tuple[str, ...]] = ("prompt", "max_tokens")

    prompt: Annotated[Any, any_of(STRING, IDS), _Prompt]
    max_tokens: int | None = 16
    temperature: float = 0.0
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class SglangBody(Body):
    """POST /generate in SGLang's form, which `answers.sglang` translates into a GenerateBody."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "input_embeds": NEVER,
        "image_data": EMPTY,
        "audio_data": EMPTY,
        "video_data": EMPTY,
        "token_ids_logprob": EMPTY,
        "session_params": EMPTY,
        "lora_path": NEVER,
        "custom_logit_processor": NEVER,
        "return_hidden_states": OFF,
    }
    no_effect: ClassVar[frozenset[str]] = frozenset({"log_metrics", "return_bytes", "modalities", "background"})

    example_fields: ClassVar[tuple[str, ...]] = ("text", "sampling_params")

    text: Annotated[str | None, RequestField("Prompt as text; this or input_ids.", "The capital of France is")] = None
    input_ids: Annotated[list[int] | None, RequestField("Prompt as token ids; this or text.")] = None
    sampling_params: Annotated[
        dict[str, Any],
        RequestField(
            "Fields of GenerateBody; also max_new_tokens, min_new_tokens and sampling_seed.", {"max_new_tokens": 64}
        ),
    ] = Field({})
    rid: Rid = None
    return_logprob: Annotated[bool, RequestField("Return log-probabilities.", False)] = False
    logprob_start_len: Annotated[
        int, RequestField("Position of the first token of the prompt that is scored; -1: none is.", -1, ge=-1)
    ] = -1
    top_logprobs_num: Annotated[
        int, RequestField("Most likely alternatives to return with each token.", 0, ge=0, le="max_logprobs")
    ] = 0
    return_text_in_logprobs: Annotated[
        bool, RequestField("Return the text of each token with its log-probability.", False)
    ] = False
    extra_key: ExtraKey = None
    priority: Priority = 0
    stream: Stream = False


class TokenizeBody(ConversationBody):
    """POST /tokenize: a text, or a conversation as /v1/chat/completions takes it."""

    example_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Annotated[str | None, RequestField("Text; this or messages.", "Hello")] = None
    messages: Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]] | None, _Messages] = None
    add_special_tokens: Annotated[
        bool | None, RequestField("Add the tokenizer's special tokens, such as BOS; none: as generation does.", True)
    ] = None
    return_token_strs: Annotated[bool, RequestField("Return token_strs, the text of each token.", False)] = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    example_fields: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: Annotated[
        list[int], RequestField("Token ids.", [1, 2], max_length=MAX_ITEMS, noun="ids", entries=(TOKEN_ID,))
    ]


class AbortBody(Body):
    """POST /abort, and SGLang's /abort_request with its field names."""

    example_fields: ClassVar[tuple[str, ...]] = ("request_id",)

    request_id: Annotated[
        str | None, RequestField("Id of an answer, its x-request-id, or the request's own.", "job-1")
    ] = None
    request_ids: Annotated[list[str], RequestField("Several of them.", ["job-1", "job-2"])] = Field([])
    all: Annotated[bool, RequestField("End every request.", False)] = False
    rid: Annotated[str | None, RequestField("SGLang's name of request_id.", "job-1")] = None
    abort_all: Annotated[bool, RequestField("SGLang's name of all.", False)] = False

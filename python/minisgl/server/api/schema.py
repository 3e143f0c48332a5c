"""Request bodies. A field is declared here or named in `not_supported` or `no_effect`; others are unknown.

Types are checked here and nested values are named in errors by their dotted path; the ranges of sampling parameters
are checked by `SamplingParams.validate` alone. Types are strict: "5" and 5.0 are not integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from minisgl.core import InvalidRequest, Limits, SamplingParams

MAX_CHOICES = 64
MAX_PRIORITY = 1000

_ZERO = (0,)
_OFF = (False,)
_EMPTY: tuple[Any, ...] = ([], {}, "")
_NEVER: tuple[Any, ...] = ()


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _any_of(*kinds: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(kinds)})


_STRING = {"type": "string"}
_STRINGS = {"type": "array", "items": _STRING}
_IDS = {"type": "array", "items": {"type": "integer"}}

OneOrMoreStrings = Annotated[list[str], BeforeValidator(_as_list), _any_of(_STRING, _STRINGS)]
Prompt = Annotated[Any, _any_of(_STRING, _STRINGS, _IDS, {"type": "array", "items": _IDS})]


class Body(BaseModel):
    """What every route takes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())

    # Fields of OpenAI's API, and of other servers', that would change the answer, with the values that would not.
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        return frozenset(cls.model_fields) | frozenset(cls.not_supported) | cls.no_effect


class RequestBody(Body):
    """What every generating route takes."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "presence_penalty": _ZERO,
        "frequency_penalty": _ZERO,
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "logit_bias": _EMPTY,
        "min_tokens": _ZERO,
        "allowed_token_ids": _NEVER,
        "bad_words": _EMPTY,
        "prompt_logprobs": _NEVER,
        "response_format": ({"type": "text"},),
        "structured_outputs": _EMPTY,
        "guided_json": _NEVER,
        "guided_regex": _NEVER,
        "guided_choice": _NEVER,
        "guided_grammar": _NEVER,
        "json_schema": _NEVER,
        "regex": _NEVER,
        "ebnf": _NEVER,
        "include_stop_str_in_output": _OFF,
        "return_token_ids": _OFF,
        "truncate_prompt_tokens": _NEVER,
        "use_beam_search": _OFF,
    }
    no_effect: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction"}
    )

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: OneOrMoreStrings = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0  # larger goes first
    stream: bool = False

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        return self.max_tokens

    def sampling(self, limits: Limits) -> SamplingParams:
        """Valid sampling parameters, or InvalidRequest."""
        params = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            ignore_eos=self.ignore_eos,
            max_tokens=self.token_limit,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
        )
        params.validate(limits)
        return params


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class OpenAIBody(RequestBody):
    """What chat and text completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream_options: StreamOptions | None = None

    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk; InvalidRequest if there is no stream to end."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options", "stream_options is only allowed when stream is true")
        return bool(self.stream_options.include_usage)


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions"""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIBody.not_supported,
        "logprobs": _OFF,
        "top_logprobs": _ZERO,
        "functions": _EMPTY,
        "function_call": ("none", "auto"),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "audio": _NEVER,
        "modalities": (["text"],),
        "web_search_options": _NEVER,
        "reasoning_effort": _NEVER,
        "verbosity": ("medium",),
        "echo": _OFF,
        "continue_final_message": _OFF,
        "add_generation_prompt": (True,),
    }

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(OpenAIBody):
    """POST /v1/completions"""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIBody.not_supported,
        "logprobs": _NEVER,
        "suffix": ("",),
    }

    prompt: Prompt
    max_tokens: int | None = 16  # OpenAI's default
    echo: bool = False
    best_of: int | None = None


class GenerateBody(RequestBody):
    """POST /generate: one prompt, greedy unless asked otherwise."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **RequestBody.not_supported,
        "n": (1,),
        "sampling_params": _EMPTY,
        "stream_options": _EMPTY,
    }

    prompt: Annotated[Any, _any_of(_STRING, _IDS)]
    max_tokens: int | None = 16
    temperature: float = 0.0


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation as /v1/chat/completions takes it."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # none: as generation does
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: list[int]


class AbortBody(Body):
    """POST /abort, and SGLang's /abort_request with its names."""

    request_id: str | None = None
    request_ids: list[str] = []
    all: bool = False
    rid: str | None = None
    abort_all: bool = False

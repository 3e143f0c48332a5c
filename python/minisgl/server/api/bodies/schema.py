"""Request bodies. A field is declared here or named in `not_supported` or `no_effect`; others are unknown.

Types are checked here and nested values are named in errors by their dotted path; the ranges of sampling parameters
are checked by `SamplingParams.validate` alone. Types are strict: "5" and 5.0 are not integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from minisgl.core import MAX_LOGIT_BIASES, Grammar, InvalidRequest, SamplingParams
from minisgl.limits import MAX_OPENAI_TEMPERATURE, Limits
from minisgl.message.types import TextOptions
from minisgl.server.api.bodies.scan import MAX_ITEMS
from minisgl.server.api.bodies.structured import (
    ResponseFormat,
    Schema,
    StructuredOutputs,
    choice_grammar,
    context_free_grammar,
    schema_grammar,
    the_one_grammar,
)

MAX_PRIORITY = 1000
MAX_CACHE_SALT_CHARS = 1024
MAX_REQUEST_ID_CHARS = 256
MAX_MESSAGES = 8192
GRAMMAR_FIELDS = ("grammar", "response_format", "structured_outputs")  # in the refusals of grammars
MAX_TOKENS_TO_DECODE = MAX_ITEMS

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

_CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
_RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
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
        "length_penalty": (1,),
        "use_beam_search": _OFF,
        "guided_whitespace_pattern": _NEVER,
        "logits_processors": _EMPTY,
        "custom_logit_processor": _NEVER,
        "stop_regex": _EMPTY,
        "lora_path": _NEVER,
        "return_hidden_states": _OFF,
        "return_tokens_as_token_ids": _OFF,
        "prompt_embeds": _NEVER,
        "session_params": _EMPTY,
        "custom_params": _EMPTY,
        "vllm_xargs": _EMPTY,
        "spaces_between_special_tokens": (True,),
    }
    no_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prediction",
            "guided_decoding_backend",
            "mm_processor_kwargs",
        }
    )
    max_temperature: ClassVar[float] = 100.0

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: OneOrMoreStrings = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] = {}  # by token id
    allowed_token_ids: list[int] | None = None
    bad_words: OneOrMoreStrings = []
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False  # SGLang's name of the same
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    cache_salt: _CacheSalt | None = None
    extra_key: _CacheSalt | None = None  # SGLang's name of the same
    request_id: _RequestId | None = None  # a name for /abort
    rid: _RequestId | None = None  # SGLang's name of the same
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0  # larger goes first
    stream: bool = False

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's, as the guided ones
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None  # SGLang's, as the next two
    regex: str | None = None
    ebnf: str | None = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        return self.max_tokens

    @property
    def salt(self) -> str:
        """Prefixes in the cache are shared with requests of the same salt."""
        return self.cache_salt or self.extra_key or ""

    @property
    def own_names(self) -> tuple[str, ...]:
        """What the client calls the request, for /abort."""
        return tuple(name for name in (self.request_id, self.rid) if name is not None)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to each generated token are wanted; None: not even the token's own probability."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    def sampling(self, limits: Limits) -> SamplingParams:
        """Valid sampling parameters, or InvalidRequest."""
        if not 0.0 <= self.temperature <= self.max_temperature:
            raise InvalidRequest(
                "temperature", f"temperature must be between 0 and {self.max_temperature:g}, not {self.temperature}"
            )
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
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(_bias(token, bias) for token, bias in self.logit_bias.items()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            grammar=self.grammar(),
        )
        params.validate(limits)
        return params

    def grammar(self) -> Grammar | None:
        """What the answer must look like."""
        grammars = self._grammars()
        for field, grammar in grammars.items():
            grammar.check_size(field)
        return the_one_grammar(grammars)

    @property
    def grammar_names(self) -> dict[str, str]:
        """What a refused grammar is called by the workers -> the field that it came from."""
        return dict.fromkeys(GRAMMAR_FIELDS, next(iter(self._grammars()), GRAMMAR_FIELDS[0]))

    def _grammars(self) -> dict[str, Grammar]:
        found = {
            "response_format": None if self.response_format is None else self.response_format.grammar(),
            "guided_json": None if self.guided_json is None else schema_grammar(self.guided_json),
            "guided_regex": None if self.guided_regex is None else Grammar("regex", self.guided_regex),
            "guided_choice": None if self.guided_choice is None else choice_grammar(self.guided_choice),
            "guided_grammar": None if self.guided_grammar is None else context_free_grammar(self.guided_grammar),
            "json_schema": None if self.json_schema is None else schema_grammar(self.json_schema),
            "regex": None if self.regex is None else Grammar("regex", self.regex),
            "ebnf": None if self.ebnf is None else Grammar("ebnf", self.ebnf),
        }
        nested = {} if self.structured_outputs is None else self.structured_outputs.grammars()
        return {name: grammar for name, grammar in found.items() if grammar is not None} | nested

    def text_options(self, *, continues: bool) -> TextOptions:
        """How output ids become text, which continues that of the prompt or stands for itself."""
        return TextOptions(
            tuple(self.stop),
            self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output or self.no_stop_trim,
            continues=continues,
        )

    def truncation(self, limits: Limits) -> int | None:
        """How many tokens of the prompt to keep; -1: as many as fit; None: all, or nothing."""
        keep = self.truncate_prompt_tokens
        if keep is not None and not (keep == -1 or 1 <= keep <= limits.max_seq_len):
            raise InvalidRequest(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens must be -1 (as many as fit) or between 1 and {limits.max_seq_len}, not {keep}",
            )
        return keep


def _bias(token: str, bias: float) -> tuple[int, float]:
    if not (token.isascii() and token.isdecimal() and len(token) < 12):
        raise InvalidRequest(
            f"logit_bias.{token[:40]}", f"logit_bias: the keys must be token ids in digits, not {token[:40]!r}"
        )
    return int(token), bias


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(RequestBody):
    """What chat and text completions share."""

    max_temperature: ClassVar[float] = MAX_OPENAI_TEMPERATURE

    n: Annotated[int, Field(ge=1)] = 1
    stream_options: StreamOptions | None = None

    def sampling(self, limits: Limits) -> SamplingParams:
        if self.n > limits.max_choices:
            raise InvalidRequest("n", f"n must be between 1 and {limits.max_choices}, not {self.n}")
        return super().sampling(limits)

    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk; InvalidRequest if there is no stream to end."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options", "stream_options is only allowed when stream is true")
        return bool(self.stream_options.include_usage)

    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ConversationBody(Body):
    """What makes a conversation's prompt, besides its messages."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, _any_of(_STRING, {"type": "object"})] = "auto"  # see `tools.tool_use`
    parallel_tool_calls: bool = True
    functions: list[dict[str, Any]] | None = None  # the older form of tools
    function_call: Annotated[Any, _any_of(_STRING, {"type": "object"})] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None  # none: unless the last message is to be continued
    continue_final_message: bool = False

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets: the effort under the names that templates use, and what is given by name."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinks = self.reasoning_effort != "none"
        effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        return effort | self.chat_template_kwargs


class ChatBody(OpenAIBody, ConversationBody):
    """POST /v1/chat/completions"""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIBody.not_supported,
        "best_of": (1,),
        "suffix": ("",),
        "audio": _NEVER,
        "modalities": (["text"],),
        "web_search_options": _NEVER,
        "verbosity": ("medium",),
        "documents": _EMPTY,
        "chat_template": _NEVER,
        "thinking_token_budget": _NEVER,
        "add_special_tokens": _OFF,
    }

    messages: Messages
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    include_reasoning: bool = True  # vLLM's: the thought is written
    separate_reasoning: bool = True  # SGLang's: it is no part of the content
    echo: bool = False

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

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIBody.not_supported,
        "suffix": ("",),
    }

    prompt: Prompt
    max_tokens: int | None = 16  # OpenAI's default
    add_special_tokens: bool = True  # to prompts of text
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    def sampling(self, limits: Limits) -> SamplingParams:
        if self.best_of is not None and self.best_of > limits.max_choices:
            raise InvalidRequest("best_of", f"best_of must be at most {limits.max_choices}, not {self.best_of}")
        return super().sampling(limits)

    @property
    def num_choices(self) -> int:
        """How many answers to generate, of which the best n are given; InvalidRequest if that is not possible."""
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
            return 0  # the best are chosen by them
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo's tokens have the log-probabilities of the answer's; without an answer there are only these."""
        if not self.echo:
            return self.prompt_logprobs
        asked = [number for number in (self.prompt_logprobs, self.logprobs) if number is not None]
        return max(asked, default=0 if self.max_tokens == 0 else None)


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
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class SglangBody(Body):
    """POST /generate as SGLang has it; `sglang` puts it into the words of GenerateBody."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "input_embeds": _NEVER,
        "image_data": _EMPTY,
        "audio_data": _EMPTY,
        "video_data": _EMPTY,
        "token_ids_logprob": _EMPTY,
        "session_params": _EMPTY,
        "lora_path": _NEVER,
        "custom_logit_processor": _NEVER,
        "return_hidden_states": _OFF,
    }
    no_effect: ClassVar[frozenset[str]] = frozenset({"log_metrics", "return_bytes", "modalities", "background"})

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] = {}
    rid: _RequestId | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1  # position of the first token of the prompt that is scored; -1: none is
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    extra_key: _CacheSalt | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    stream: bool = False


class TokenizeBody(ConversationBody):
    """POST /tokenize: a text, or a conversation as /v1/chat/completions takes it."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # none: as generation does
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS_TO_DECODE)]


class AbortBody(Body):
    """POST /abort, and SGLang's /abort_request with its names."""

    request_id: str | None = None
    request_ids: list[str] = []
    all: bool = False
    rid: str | None = None
    abort_all: bool = False

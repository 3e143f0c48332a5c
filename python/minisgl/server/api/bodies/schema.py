"""Request bodies. A field is declared here or named in `not_supported` or `no_effect`; others are unknown.

Types are checked here and nested values are named in errors by their dotted path. Types are strict: "5" and 5.0 are
not integers. A field's sentence, example and bounds are those of its `RequestField`, which `Body.check_bounds` checks,
or else of the sampling parameter of its name, which `SamplingParams.validate` checks. The OpenAPI document
(`server.api.openapi`) is made from all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from minisgl.core import Grammar, InvalidRequest, SamplingParams
from minisgl.limits import MAX_OPENAI_TEMPERATURE, Limits
from minisgl.message.types import TextOptions
from minisgl.request_fields import TOKEN_ID, RequestField, bounded_fields
from minisgl.server.api.bodies.messages import ROLES
from minisgl.server.api.bodies.scan import MAX_ITEMS
from minisgl.structured_output.response_format import (
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

_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": [*ROLES, "function"]},
        "content": {"anyOf": [_STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": _STRING,
        "name": _STRING,
    },
}
_CacheSalt = Annotated[
    str | None,
    RequestField(
        "Cached prefixes are shared with requests of the same salt only.",
        "tenant-1",
        min_length=1,
        max_length=MAX_CACHE_SALT_CHARS,
    ),
]
_RequestId = Annotated[
    str | None,
    RequestField(
        "Name of the request for /abort, besides its answer's id.",
        "job-1",
        min_length=1,
        max_length=MAX_REQUEST_ID_CHARS,
    ),
]
_Priority = Annotated[
    int, RequestField("Larger goes first among requests that wait.", 0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
]
_Stream = Annotated[bool, RequestField("Answer as server-sent events, ended by [DONE].", False)]
_Prompt = RequestField("Text, or token ids, to go on from.", "The capital of France is")
_Messages = RequestField(
    "The conversation, oldest message first.",
    [{"role": "user", "content": "What is the capital of France?"}],
    min_length=1,
    max_length=MAX_MESSAGES,
    noun="messages",
)
Messages = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]],
    _Messages,
]
OneOrMoreStrings = Annotated[list[str], BeforeValidator(_as_list), _any_of(_STRING, _STRINGS)]
Prompt = Annotated[Any, _any_of(_STRING, _STRINGS, _IDS, {"type": "array", "items": _IDS}), _Prompt]


class Body(BaseModel):
    """What every route takes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())

    # Fields of OpenAI's API, and of other servers', that would change the answer, with the values that would not.
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()
    example_fields: ClassVar[tuple[str, ...]] = ()  # fields of the example in the OpenAPI document

    model: Annotated[str | None, RequestField("A served name; none: the model.")] = None

    def check_bounds(self, limits: Limits) -> None:
        """Raise InvalidRequest for the first value outside the bounds that this class declares."""
        for name, field in bounded_fields(type(self)).items():
            if (text := field.refusal(name, getattr(self, name), limits)) is not None:
                raise InvalidRequest(name, text)

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
    logit_bias: dict[str, float] = {}  # by token id
    allowed_token_ids: list[int] | None = None
    bad_words: OneOrMoreStrings = []
    prompt_logprobs: int | None = None
    skip_special_tokens: Annotated[bool, RequestField("Leave special tokens out of the text.", True)] = True
    include_stop_str_in_output: Annotated[bool, RequestField("The text ends with what stopped it.", False)] = False
    no_stop_trim: Annotated[bool, RequestField("SGLang's name of include_stop_str_in_output.", False)] = False
    return_token_ids: Annotated[bool, RequestField("Return token_ids and prompt_token_ids.", False)] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        RequestField("Keep so many tokens of the prompt's end; -1: as many as fit.", 512, ge=-1, le="max_seq_len"),
    ] = None
    cache_salt: _CacheSalt = None
    extra_key: _CacheSalt = None  # SGLang's name of the same
    request_id: _RequestId = None
    rid: _RequestId = None  # SGLang's name of the same
    priority: _Priority = 0
    stream: _Stream = False

    response_format: Annotated[
        ResponseFormat | None,
        RequestField("OpenAI's structured output: text, json_object or json_schema.", {"type": "json_object"}),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        RequestField(
            "vLLM's structured output: one of json, json_object, regex, choice and grammar.", {"regex": "[0-9]+"}
        ),
    ] = None
    guided_json: Annotated[
        Schema | None, RequestField("JSON Schema, or its text, that the answer follows (vLLM).", {"type": "object"})
    ] = None
    guided_regex: Annotated[
        str | None, RequestField("Regular expression that the answer matches (vLLM).", "[0-9]+")
    ] = None
    guided_choice: Annotated[list[str] | None, RequestField("The answer is one of these (vLLM).", ["yes", "no"])] = None
    guided_grammar: Annotated[
        str | None,
        RequestField("EBNF if it has ::=, else llguidance's Lark, of the answer (vLLM).", 'root ::= "a"'),
    ] = None
    json_schema: Annotated[
        Schema | None, RequestField("JSON Schema, or its text, that the answer follows (SGLang).", '{"type": "object"}')
    ] = None
    regex: Annotated[str | None, RequestField("Regular expression that the answer matches (SGLang).", "[0-9]+")] = None
    ebnf: Annotated[str | None, RequestField("EBNF of the answer (SGLang).", 'root ::= "a"')] = None

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
        if keep == 0:
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

    temperature: Annotated[
        float,
        RequestField("Randomness of the choice; below 0.00001 it is greedy.", 0.7, ge=0, le=MAX_OPENAI_TEMPERATURE),
    ] = 1.0
    n: Annotated[int, RequestField("Answers to each prompt.", 1, ge=1, le="max_choices")] = 1
    stream_options: Annotated[
        StreamOptions | None, RequestField("include_usage, continuous_usage_stats; only with stream.")
    ] = None

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

    tools: Annotated[
        list[dict[str, Any]] | None,
        RequestField("Functions that the model may call.", [{"type": "function", "function": {"name": "now"}}]),
    ] = None
    tool_choice: Annotated[
        Any,
        _any_of(_STRING, {"type": "object"}),
        RequestField("none, auto, required, a function by name or allowed_tools.", "auto"),
    ] = "auto"  # see `tools.tool_use`
    parallel_tool_calls: Annotated[bool, RequestField("An answer may have more than one call.", True)] = True
    functions: Annotated[list[dict[str, Any]] | None, RequestField("Older form of tools.", [{"name": "now"}])] = None
    function_call: Annotated[
        Any, _any_of(_STRING, {"type": "object"}), RequestField("Older form of tool_choice; with functions.", "auto")
    ] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
        RequestField("Given to the chat template; `none`: without a thought.", "low"),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], RequestField("Given to the chat template by name.", {"enable_thinking": False})
    ] = {}
    add_generation_prompt: Annotated[
        bool | None, RequestField("The prompt ends with the begin of an answer; none: unless continued.", True)
    ] = None
    continue_final_message: Annotated[bool, RequestField("The answer goes on from the last message.", False)] = False

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

    example_fields: ClassVar[tuple[str, ...]] = ("messages", "max_completion_tokens", "temperature")

    messages: Messages
    logprobs: Annotated[bool, RequestField("Return log-probabilities of the answer's tokens.", False)] = False
    top_logprobs: Annotated[
        int | None,
        RequestField("Most likely alternatives to return with each; needs logprobs.", 0, ge=0, le="max_logprobs"),
    ] = None
    max_tokens: Annotated[
        int | None, RequestField("Older name of max_completion_tokens; none: as many as fit.", 64, ge=0)
    ] = None
    max_completion_tokens: Annotated[
        int | None, RequestField("Most tokens to generate; 0 scores the prompt alone, with prompt_logprobs.", 64, ge=0)
    ] = None
    include_reasoning: Annotated[bool, RequestField("Write the thought (vLLM).", True)] = True
    separate_reasoning: Annotated[bool, RequestField("The thought is no part of the content (SGLang).", True)] = True
    echo: Annotated[bool, RequestField("The answer begins with the message that it continues.", False)] = False

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

    example_fields: ClassVar[tuple[str, ...]] = ("prompt", "max_tokens", "temperature")

    prompt: Prompt
    max_tokens: int | None = 16  # OpenAI's default
    add_special_tokens: Annotated[bool, RequestField("Add BOS and its like to prompts of text.", True)] = True
    logprobs: int | None = None
    echo: Annotated[bool, RequestField("The answer begins with the prompt.", False)] = False
    best_of: Annotated[
        int | None,
        RequestField("Generate this many and return the n likeliest.", 1, ge=1, le="max_choices"),
    ] = None

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

    example_fields: ClassVar[tuple[str, ...]] = ("prompt", "max_tokens")

    prompt: Annotated[Any, _any_of(_STRING, _IDS), _Prompt]
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

    example_fields: ClassVar[tuple[str, ...]] = ("text", "sampling_params")

    text: Annotated[str | None, RequestField("Prompt as text; this or input_ids.", "The capital of France is")] = None
    input_ids: Annotated[list[int] | None, RequestField("Prompt as token ids; this or text.")] = None
    sampling_params: Annotated[
        dict[str, Any],
        RequestField(
            "Fields of GenerateBody; also max_new_tokens, min_new_tokens and sampling_seed.", {"max_new_tokens": 64}
        ),
    ] = {}
    rid: _RequestId = None
    return_logprob: Annotated[bool, RequestField("Return log-probabilities.", False)] = False
    logprob_start_len: Annotated[
        int, RequestField("Position of the first token of the prompt that is scored; -1: none is.", -1, ge=-1)
    ] = -1
    top_logprobs_num: Annotated[
        int, RequestField("Most likely alternatives to return with each token.", 0, ge=0, le="max_logprobs")
    ] = 0
    return_text_in_logprobs: Annotated[bool, RequestField("With the text of each token.", False)] = False
    extra_key: _CacheSalt = None
    priority: _Priority = 0
    stream: _Stream = False


class TokenizeBody(ConversationBody):
    """POST /tokenize: a text, or a conversation as /v1/chat/completions takes it."""

    example_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Annotated[str | None, RequestField("Text; this or messages.", "Hello")] = None
    messages: Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]] | None, _Messages] = None
    add_special_tokens: Annotated[
        bool | None, RequestField("Add BOS and its like; none: as generation does.", True)
    ] = None
    return_token_strs: Annotated[bool, RequestField("Return token_strs, the text of each token.", False)] = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    example_fields: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: Annotated[
        list[int], RequestField("Token ids.", [1, 2], max_length=MAX_TOKENS_TO_DECODE, noun="ids", entries=(TOKEN_ID,))
    ]


class AbortBody(Body):
    """POST /abort, and SGLang's /abort_request with its names."""

    example_fields: ClassVar[tuple[str, ...]] = ("request_id",)

    request_id: Annotated[
        str | None, RequestField("Id of an answer, its x-request-id, or the request's own.", "job-1")
    ] = None
    request_ids: Annotated[list[str], RequestField("Several of them.", ["job-1", "job-2"])] = []
    all: Annotated[bool, RequestField("End every request.", False)] = False
    rid: Annotated[str | None, RequestField("SGLang's name of request_id.", "job-1")] = None
    abort_all: Annotated[bool, RequestField("SGLang's name of all.", False)] = False

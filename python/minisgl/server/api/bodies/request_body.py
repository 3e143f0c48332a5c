"""Fields that every generating route takes, and the sampling parameters, grammar and options that they become.

A sampling parameter is declared once, in `SamplingParams`; its field in the body is made from that declaration, and
`SamplingParams.validate` checks its bounds. Any other field has a `RequestField` with its sentence, example and bounds,
which `Body.check_bounds` checks. The OpenAPI document (`server.api.openapi`) is made from both. Types are strict: "5"
and 5.0 are not integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model

from minisgl.limits import Limits
from minisgl.message.shared import TextOptions
from minisgl.request_fields import RequestField, bounded_fields, request_fields
from minisgl.sampling_params import Grammar, InvalidRequest, SamplingParams
from minisgl.structured_output.response_format import (
    Options,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    choice_grammar,
    context_free_grammar,
    schema_grammar,
    single_grammar,
)

GRAMMAR_FIELDS = ("grammar", "response_format", "structured_outputs")  # names that refusals of a grammar may have

# Harmless values of fields that are not supported.
OFF = (False,)
EMPTY: tuple[Any, ...] = ([], {}, "")
NEVER: tuple[Any, ...] = ()


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def any_of(*kinds: dict[str, Any]) -> WithJsonSchema:
    """Return the JSON Schema of a field that may have several types, for the OpenAPI document."""
    return WithJsonSchema({"anyOf": list(kinds)})


STRING = {"type": "string"}
STRINGS = {"type": "array", "items": STRING}
OneOrMoreStrings = Annotated[list[str], BeforeValidator(_as_list), any_of(STRING, STRINGS)]

_CACHE_SALT = RequestField(
    "Cached prefixes are shared with requests of the same salt only.", "tenant-1", min_length=1, max_length=1024
)
_REQUEST_ID = RequestField(
    "Name by which /abort finds the request, besides its answer's id.", "job-1", min_length=1, max_length=256
)
CacheSalt = Annotated[str | None, _CACHE_SALT]
ExtraKey = Annotated[str | None, replace(_CACHE_SALT, help="SGLang's name of cache_salt.")]
RequestId = Annotated[str | None, _REQUEST_ID]
Rid = Annotated[str | None, replace(_REQUEST_ID, help="SGLang's name of request_id.")]
Priority = Annotated[
    int, RequestField("Waiting requests with a larger value go first, however long others wait.", 0, ge=-1000, le=1000)
]
Stream = Annotated[bool, RequestField("Answer as server-sent events, ended by [DONE].", False)]


class Body(Options):
    """Body of every route."""

    # Fields of OpenAI's API, and of other servers', that are refused unless they have one of these harmless values.
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()  # known fields that are ignored
    example_fields: ClassVar[tuple[str, ...]] = ()  # fields of the example in the OpenAPI document

    model: Annotated[str | None, RequestField("One of the model's served names.")] = None

    def check_bounds(self, limits: Limits) -> None:
        """Raise InvalidRequest for the first value outside the bounds that this class declares."""
        for name, field in bounded_fields(type(self)).items():
            if (text := field.refusal(name, getattr(self, name), limits)) is not None:
                raise InvalidRequest(name, text)

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        return frozenset(cls.model_fields) | frozenset(cls.not_supported) | cls.no_effect


class QueuedBody(Body):
    """Body of every route whose requests wait for the engine."""

    cache_salt: CacheSalt = None
    request_id: RequestId = None
    rid: Rid = None
    priority: Priority = 0

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names that the client gives the request, for /abort."""
        return tuple(name for name in (self.request_id, self.rid) if name is not None)


JSON_TYPES: dict[Any, Any] = {  # types of sampling parameters that have another type in JSON
    tuple[str, ...]: OneOrMoreStrings,
    tuple[int, ...]: list[int],
    tuple[int, ...] | None: list[int] | None,
    tuple[tuple[int, float], ...]: dict[str, float],  # by token id
}
JSON_DEFAULTS: dict[Any, Any] = {OneOrMoreStrings: [], list[int]: [], dict[str, float]: {}}
# Without logprobs, which is a flag in chats and a number in completions.
SAMPLING_FIELDS = tuple(name for name in request_fields(SamplingParams) if name != "logprobs")


def _sampling_fields() -> dict[str, Any]:
    """Return type and default of each sampling parameter's field."""
    hints, defaults = get_type_hints(SamplingParams), SamplingParams()
    kinds = {name: JSON_TYPES.get(hints[name], hints[name]) for name in SAMPLING_FIELDS}
    return {name: (kind, JSON_DEFAULTS.get(kind, getattr(defaults, name))) for name, kind in kinds.items()}


def _sampling_value(value: Any) -> Any:
    """Return a field's value as `SamplingParams` has it."""
    if isinstance(value, dict):
        return tuple(_bias(token, bias) for token, bias in value.items())
    return tuple(value) if isinstance(value, list) else value


if TYPE_CHECKING:
    SamplingBody = QueuedBody
else:
    SamplingBody = create_model("SamplingBody", __base__=QueuedBody, **_sampling_fields())

# Functions that make a grammar of a field's value.
GRAMMARS: Mapping[str, Callable[[Any], Grammar | None]] = {
    "response_format": ResponseFormat.grammar,
    "guided_json": schema_grammar,
    "guided_regex": partial(Grammar, "regex"),
    "guided_choice": choice_grammar,
    "guided_grammar": context_free_grammar,
    "json_schema": schema_grammar,
    "regex": partial(Grammar, "regex"),
    "ebnf": partial(Grammar, "ebnf"),
}


class RequestBody(SamplingBody):
    """Body of every generating route."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "length_penalty": (1,),
        "use_beam_search": OFF,
        "guided_whitespace_pattern": NEVER,
        "logits_processors": EMPTY,
        "custom_logit_processor": NEVER,
        "stop_regex": EMPTY,
        "lora_path": NEVER,
        "return_hidden_states": OFF,
        "return_tokens_as_token_ids": OFF,
        "prompt_embeds": NEVER,
        "session_params": EMPTY,
        "custom_params": EMPTY,
        "vllm_xargs": EMPTY,
        "spaces_between_special_tokens": (True,),
        "moderation": NEVER,
        "truncation_side": ("left",),
        "repetition_detection": NEVER,
        "logprob_token_ids": NEVER,
        "watermarking": OFF,
        "return_prompt_text": OFF,
        "return_prompt_token_ids": OFF,
        "return_meta_info": OFF,
        "return_routed_experts": OFF,
        "return_cached_tokens_details": OFF,
    }
    no_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "prediction",
            "guided_decoding_backend",
            "mm_processor_kwargs",
            "session_id",
            "stream_interval",
        }
    )
    # Their defaults differ from those of `SamplingParams`, or properties below read them.
    max_tokens: int | None = None
    temperature: float = 1.0
    stop: OneOrMoreStrings = Field([])
    prompt_logprobs: int | None = None

    skip_special_tokens: Annotated[bool, RequestField("Leave special tokens out of the answer's text.", True)] = True
    include_stop_str_in_output: Annotated[
        bool, RequestField("Keep the stop string or token at the end of the text.", False)
    ] = False
    no_stop_trim: Annotated[bool, RequestField("SGLang's name of include_stop_str_in_output.", False)] = False
    return_token_ids: Annotated[bool, RequestField("Return token_ids and prompt_token_ids.", False)] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        RequestField(
            "Keep this many tokens of the prompt, from its end; -1: as many as fit.", 512, ge=-1, le="max_seq_len"
        ),
    ] = None
    extra_key: ExtraKey = None
    stream: Stream = False

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
        str | None, RequestField("EBNF if it has ::=, else llguidance's Lark, of the answer (vLLM).", 'root ::= "a"')
    ] = None
    json_schema: Annotated[
        Schema | None, RequestField("JSON Schema, or its text, that the answer follows (SGLang).", '{"type": "object"}')
    ] = None
    regex: Annotated[str | None, RequestField("Regular expression that the answer matches (SGLang).", "[0-9]+")] = None
    ebnf: Annotated[str | None, RequestField("EBNF of the answer (SGLang).", 'root ::= "a"')] = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None: as many as the context holds."""
        return self.max_tokens

    @property
    def salt(self) -> str:
        """Cache salt: prefixes are shared among requests with the same salt; "" if the request has none."""
        return self.cache_salt or self.extra_key or ""

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to return with each generated token; None: no log-probabilities at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to return with each token of the prompt; None: no log-probabilities of it."""
        return self.prompt_logprobs

    def sampling(self, limits: Limits) -> SamplingParams:
        """Return valid sampling parameters; InvalidRequest for the first that is wrong."""
        values = {name: _sampling_value(getattr(self, name)) for name in SAMPLING_FIELDS}
        values |= {
            "max_tokens": self.token_limit,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
            "grammar": self.grammar(),
        }
        params = SamplingParams(**values)
        params.validate(limits)
        return params

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer, if any; InvalidRequest if several fields give one."""
        grammars = self._grammars()
        for field, grammar in grammars.items():
            grammar.check_size(field)
        return single_grammar(grammars)

    @property
    def grammar_names(self) -> dict[str, str]:
        """Field of the body that gave the grammar, by each name that workers use when they refuse one."""
        return dict.fromkeys(GRAMMAR_FIELDS, next(iter(self._grammars()), GRAMMAR_FIELDS[0]))

    def _grammars(self) -> dict[str, Grammar]:
        given = {name: value for name in GRAMMARS if (value := getattr(self, name)) is not None}
        found = {name: GRAMMARS[name](value) for name, value in given.items()}
        nested = {} if self.structured_outputs is None else self.structured_outputs.grammars()
        return {name: grammar for name, grammar in found.items() if grammar is not None} | nested

    def text_options(self, *, continues: bool) -> TextOptions:
        """Return how output ids become text. `continues`: the text continues that of the prompt."""
        return TextOptions(
            tuple(self.stop),
            self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output or self.no_stop_trim,
            continues=continues,
        )

    def tokens_to_keep(self, limits: Limits) -> int | None:
        """Return the tokens of the prompt to keep; -1: as many as fit; None: all, or the prompt is refused."""
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

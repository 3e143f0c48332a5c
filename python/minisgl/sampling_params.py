"""Sampling parameters of a request: their fields and bounds, and the error of a request that breaks one.

Pure: no torch, no I/O. Lengths and positions count tokens.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntFlag
from typing import Annotated, Literal

import msgspec

from minisgl.limits import Limits
from minisgl.request_fields import TOKEN_ID, RequestField, bounded_fields

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # code of the error if prompt and answer do not fit

MAX_STOP_STRING_CHARS = 1024
MAX_BAD_WORD_TOKENS = 16
MAX_GRAMMAR_CHARS = 262_144
MAX_GRAMMARS_BYTES = 2 * 2**30  # memory of all grammars that requests follow at a time
MIN_TEMPERATURE = 1e-5  # requests below it are greedy, because logits divided by less might not be finite


class InvalidRequest(ValueError):
    """Error for everything that is wrong with a client's request. `field` names the field, the text says the limit.

    `code` is OpenAI's name of the error, if it has one.
    """

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.code = code


class Grammar(msgspec.Struct, frozen=True):
    """Grammar that the output must follow.

    `text` is the JSON text of the schema for json_schema and closed_json_schema, "" for json_object, the expression for
    regex, a JSON list of strings for choice, EBNF in GBNF's notation for ebnf, and llguidance's own notation for lark.
    With closed_json_schema, an object has only the keys that its schema names, unless the schema allows others. Only
    the server makes templates, never a client: Lark that `structured_output.translate` completes.
    """

    kind: Literal["json_object", "json_schema", "closed_json_schema", "regex", "choice", "ebnf", "lark", "template"]
    text: str = ""

    def check_size(self, field: str) -> None:
        """Raise InvalidRequest if the text is too long; `field` is the request's field that it came in."""
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(field, f"a grammar may have {MAX_GRAMMAR_CHARS} characters, not {len(self.text)}")


class SamplingFlags(IntFlag):
    """Work of sampling that a request needs beyond the choice of the most likely token."""

    SAMPLED = 1  # not greedy
    FILTERED = 2  # not greedy, and with top-k, top-p or min-p
    PROCESSED = 4  # penalties, biases or forbidden ids: `SamplingParams.processed`
    CONSTRAINED = 8  # a grammar
    LOGPROBS = 16  # log-probabilities of its output or of its prompt


class SamplingParams(msgspec.Struct, frozen=True):
    """Parameters of one sequence: how its tokens are chosen, and when it ends.

    The defaults are greedy decoding of up to 1024 tokens. `max_tokens=None` means as many as the context holds.
    `seed=None` means a new seed for every request. `top_k=-1` (or 0) means no limit. `max_tokens=0` only scores the
    prompt, and needs `prompt_logprobs`.

    Logits are processed in this order: `logit_bias` is added; the repetition penalty (on all tokens so far), the
    frequency and the presence penalty (on output tokens) apply; ids that `grammar`, `allowed_token_ids`, `bad_words` or
    `min_tokens` forbid are excluded; then come the temperature and the filters. Log-probabilities are those of the
    logits before all of this or, with --logprobs-mode processed_logprobs, before the filters.
    """

    temperature: Annotated[
        float, RequestField("Randomness of the choice; below 0.00001 it is greedy.", 0.7, ge=0, le=100)
    ] = 0.0
    top_k: Annotated[
        int, RequestField("Choose among this many most likely tokens; -1 or 0: all.", 40, ge=-1, le=2**31 - 1)
    ] = -1
    top_p: Annotated[
        float, RequestField("Choose among the most likely tokens of this total probability.", 0.9, gt=0, le=1)
    ] = 1.0
    ignore_eos: Annotated[bool, RequestField("Go on after the model's own end token.", False)] = False
    max_tokens: Annotated[
        int | None,
        RequestField("Most tokens to generate; 0 scores the prompt alone, with prompt_logprobs or echo.", 64, ge=0),
    ] = 1024
    min_p: Annotated[
        float,
        RequestField(
            "Choose among tokens of at least this share of the most likely token's probability.", 0.05, ge=0, le=1
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        RequestField("Seed of the random choice; none: a fresh one.", 42, ge=-(2**63), le=2**63 - 1),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        RequestField(
            "Strings that end the answer; it stops before them.",
            ["END"],
            max_length="max_stop_strings",
            noun="stop strings",
            entries=(RequestField("Stop string.", min_length=1, max_length=MAX_STOP_STRING_CHARS),),
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], RequestField("Token ids that end the answer.", [2], max_length=256, entries=(TOKEN_ID,))
    ] = ()
    min_tokens: Annotated[
        int,
        RequestField("The answer does not end by itself before it has this many tokens; at most max_tokens.", 0, ge=0),
    ] = 0
    presence_penalty: Annotated[
        float, RequestField("Subtracted from the logit of each token that the answer already has.", 0.5, ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[
        float, RequestField("Subtracted from a token's logit for each time that the answer has it.", 0.5, ge=-2, le=2)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        RequestField(
            "Divides positive and multiplies negative logits of the tokens of prompt and answer; 1: off.",
            1.1,
            ge=0.01,
            le=10,
        ),
    ] = 1.0
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        RequestField(
            "Added to the logits of these token ids.",
            {"5": -100},
            max_length=1024,
            entries=(TOKEN_ID, RequestField("Bias of a token id.", ge=-100, le=100)),
        ),
    ] = ()
    allowed_token_ids: Annotated[
        tuple[int, ...] | None,
        RequestField(
            "No other token is generated; none: all are allowed.",
            [5, 6],
            min_length=1,
            max_length="vocab_size",
            noun="ids",
            entries=(TOKEN_ID,),
        ),
    ] = None
    bad_words: Annotated[
        tuple[str, ...],
        RequestField(
            f"Never generated, with or without a space in front; each has at most {MAX_BAD_WORD_TOKENS} tokens.",
            ["foo"],
            max_length=128,
            noun="bad words",
            entries=(RequestField("Bad word.", min_length=1, max_length=1024),),
        ),
    ] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # bad words as token ids: `tokenizer.admission` resolves them
    logprobs: Annotated[
        int | None,
        RequestField(
            "Most likely alternatives to return with each output token; 0: only the token's own.",
            2,
            ge=0,
            le="max_logprobs",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        RequestField("Alternatives to return with each token of the prompt but the first.", 2, ge=0, le="max_logprobs"),
    ] = None
    grammar: Grammar | None = None

    def validate(self, limits: Limits) -> None:
        """Raise InvalidRequest for the first value outside its bounds."""
        declared = bounded_fields(SamplingParams)
        if self.max_tokens is not None and self.max_tokens < 1 and self.prompt_logprobs is None:
            declared = declared | {"max_tokens": replace(declared["max_tokens"], ge=1)}
        if self.min_tokens:
            most = limits.max_seq_len if self.max_tokens is None else self.max_tokens
            declared = declared | {"min_tokens": replace(declared["min_tokens"], le=most)}
        for name, field in declared.items():
            if (text := field.refusal(name, getattr(self, name), limits)) is not None:
                raise InvalidRequest(name, text)
        if self.grammar is not None and self.grammar.kind == "template":
            raise InvalidRequest("grammar", "grammars of the kind template are made by the server only")
        for ids in self.bad_words_ids:
            if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest("bad_words_ids", f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens")
            if not 0 <= min(ids) <= max(ids) < limits.vocab_size:
                raise InvalidRequest("bad_words_ids", f"bad_words_ids: {ids} is outside the vocabulary")

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        return msgspec.structs.replace(self, max_tokens=max_tokens)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def processed(self) -> bool:
        """True if logits are processed before the temperature, other than by a grammar."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words_ids
        )

    @property
    def flags(self) -> SamplingFlags:
        """Flags of these parameters, except those for grammars and log-probabilities."""
        flags = SamplingFlags.PROCESSED if self.processed else SamplingFlags(0)
        if not self.greedy:
            flags |= SamplingFlags.SAMPLED
            if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0:
                flags |= SamplingFlags.FILTERED
        return flags


def resolve_max_tokens(prompt_len: int, max_tokens: int | None, limits: Limits, *, fewer: bool = False) -> int:
    """Return the number of tokens that may be generated; InvalidRequest if `max_tokens` do not fit the context.

    With `fewer`, as many as fit are generated instead. A number above `limits.max_new_tokens` is silently reduced to
    it, as in vLLM.
    """
    room = room_for_output(prompt_len, max_tokens, limits)
    if max_tokens is not None and max_tokens > room and not fewer:
        raise InvalidRequest(
            "max_tokens",
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, but {limits.context_limit}",
            CONTEXT_LENGTH_EXCEEDED,
        )
    wanted = room if max_tokens is None else min(max_tokens, room)
    return wanted if limits.max_new_tokens is None else min(wanted, limits.max_new_tokens)


def room_for_output(prompt_len: int, max_tokens: int | None, limits: Limits) -> int:
    """Return the number of tokens that fit after a prompt; InvalidRequest if none does, unless `max_tokens` is 0."""
    if prompt_len < 1:
        raise InvalidRequest("prompt", "the prompt must have at least one token")
    room = limits.max_seq_len - prompt_len
    if room < (0 if max_tokens == 0 else 1):
        raise InvalidRequest(
            "prompt",
            f"the prompt has {prompt_len} tokens, but {limits.context_limit}",
            CONTEXT_LENGTH_EXCEEDED,
        )
    return room

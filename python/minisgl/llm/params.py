"""Sampling parameters of a call: the model's defaults, and what a caller gave, validated and complete."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import torch

from minisgl.config import SamplingDefaults
from minisgl.core import Int32Array
from minisgl.limits import Limits
from minisgl.sampling_params import InvalidRequest, SamplingParams, resolve_max_tokens
from minisgl.structured_output.validator import GrammarValidator
from minisgl.tokenizer.admission import resolve_bad_words
from minisgl.tokenizer.text import TextTokenizer

logger = logging.getLogger(__name__)

_TUPLES = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words")


def default_params(defaults: SamplingDefaults) -> SamplingParams:
    """Return the parameters of a call that gives none: the model's defaults, as in vLLM, else SamplingParams'."""
    params = SamplingParams(**defaults.fields)
    return params if defaults.max_new_tokens is None else params.with_max_tokens(defaults.max_new_tokens)


def resolve_params(
    params: Sequence[SamplingParams],
    prompts: Sequence[Int32Array],
    limits: Limits,
    tokenizer: TextTokenizer,
    validator: GrammarValidator,
) -> list[SamplingParams]:
    """Return each prompt's parameters, validated and with max_tokens resolved; InvalidRequest for the first bad one."""
    resolved = []
    num_clipped = 0
    for ids, one in zip(prompts, params, strict=True):
        one = _typed(one)
        one.validate(limits)
        if one.grammar is not None:
            one = msgspec.structs.replace(one, grammar=validator.validate(one.grammar, "grammar"))
        max_tokens = resolve_max_tokens(len(ids), one.max_tokens, limits, fewer=True)
        num_clipped += one.max_tokens is not None and one.max_tokens > max_tokens
        resolved.append(resolve_bad_words(one.with_max_tokens(max_tokens), tokenizer, limits.vocab_size))
    if num_clipped:
        logger.warning(
            "max_tokens is clipped for %d of %d prompts: %s", num_clipped, len(prompts), limits.context_limit
        )
    return resolved


def _typed(params: SamplingParams) -> SamplingParams:
    """Return the parameters with the types of their declaration; InvalidRequest if a value has another type.

    Lists and arrays stand for tuples, None for an empty one, a dict for the pairs of `logit_bias`, and the numbers of
    NumPy and torch for Python's.
    """
    given = msgspec.structs.asdict(params)
    for name in _TUPLES:
        if isinstance(given[name], str):
            raise InvalidRequest(name, f"{name} must be a list, not a text")
        if given[name] is None:
            del given[name]
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = tuple(given["logit_bias"].items())
    try:
        return msgspec.convert(msgspec.to_builtins(given, enc_hook=_builtin), SamplingParams)
    except msgspec.ValidationError as error:
        name = re.split(r"[.\[`]", str(error).partition("$.")[2])[0]
        raise InvalidRequest(name, f"{name}: {error}") from None


def _builtin(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a sampling parameter has the type {type(value).__name__}")

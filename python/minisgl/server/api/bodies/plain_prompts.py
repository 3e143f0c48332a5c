"""The `prompt` field: text or token ids, one or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from minisgl.limits import Limits
from minisgl.message.packed_ids import pack_ids
from minisgl.message.to_tokenizer import IdsPrompt, TextPrompt
from minisgl.sampling_params import CONTEXT_LENGTH_EXCEEDED, InvalidRequest

PlainPrompt: TypeAlias = TextPrompt | IdsPrompt

MAX_PROMPTS = 8192  # prompts of a request
PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def parse_prompts(value: Any, limits: Limits, *, add_special_tokens: bool, cut: bool) -> list[PlainPrompt]:
    """Return the prompts of a completion request, in order. `cut`: they may be longer than the context."""
    if isinstance(value, str) or is_ids(value):
        return [parse_prompt(value, limits, add_special_tokens=add_special_tokens, cut=cut)]
    if not isinstance(value, list):
        raise InvalidRequest("prompt", f"prompt must be {PROMPT_KINDS}")
    if not value:
        raise InvalidRequest("prompt", "prompt must not be empty")
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"prompt: at most {MAX_PROMPTS} prompts are allowed, not {len(value)}")
    kind = type(value[0])
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise InvalidRequest(f"prompt.{index}", f"prompt must be {PROMPT_KINDS}")
    return [
        parse_prompt(item, limits, f"prompt.{index}", add_special_tokens=add_special_tokens, cut=cut)
        for index, item in enumerate(value)
    ]


def parse_prompt(
    value: Any, limits: Limits, param: str = "prompt", *, add_special_tokens: bool = True, cut: bool
) -> PlainPrompt:
    """Return one prompt; `param` names it in errors."""
    if isinstance(value, str):
        return TextPrompt(value, add_special_tokens)
    if isinstance(value, list):
        if not value:
            raise InvalidRequest(param, f"{param} must have at least one token id")
        if len(value) >= limits.max_seq_len and not cut:
            raise InvalidRequest(
                param, f"{param} has {len(value)} tokens, but {limits.context_limit}", CONTEXT_LENGTH_EXCEEDED
            )
        # A prompt that may be cut keeps at most `max_seq_len` tokens of its end.
        return IdsPrompt(pack_ids(checked_ids(value[-limits.max_seq_len :], limits, param)))
    raise InvalidRequest(param, f"{param} must be a string or a list of token ids")


def is_ids(value: Any) -> bool:
    """Return True for a list that begins with an integer."""
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def checked_ids(ids: Sequence[Any], limits: Limits, param: str) -> list[int]:
    """Return the token ids; InvalidRequest if one is outside the vocabulary."""
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"{param}.{index}", f"{param}.{index}: token ids are integers from 0 to {limits.vocab_size - 1}"
            )
    return list(ids)

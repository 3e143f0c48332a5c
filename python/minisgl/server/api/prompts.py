"""The `prompt` field: text or token ids, one or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from minisgl.core import InvalidRequest, Limits
from minisgl.message.to_tokenizer import IdsPrompt, TextPrompt
from minisgl.message.types import pack_ids

PlainPrompt: TypeAlias = TextPrompt | IdsPrompt

_KINDS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def parse_prompts(value: Any, limits: Limits) -> list[PlainPrompt]:
    """The prompts of a completion request, in order."""
    if isinstance(value, str) or _is_ids(value):
        return [parse_prompt(value, limits)]
    if not isinstance(value, list):
        raise InvalidRequest("prompt", f"prompt must be {_KINDS}")
    if not value:
        raise InvalidRequest("prompt", "prompt must not be empty")
    kind = type(value[0])
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise InvalidRequest(f"prompt.{index}", f"prompt must be {_KINDS}")
    return [parse_prompt(item, limits, f"prompt.{index}") for index, item in enumerate(value)]


def parse_prompt(value: Any, limits: Limits, param: str = "prompt") -> PlainPrompt:
    """One prompt; `param` names it in errors."""
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list):
        return IdsPrompt(pack_ids(checked_ids(value, limits, param)))
    raise InvalidRequest(param, f"{param} must be a string or a list of token ids")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def checked_ids(ids: Sequence[Any], limits: Limits, param: str) -> list[int]:
    if not ids:
        raise InvalidRequest(param, f"{param} must have at least one token id")
    if len(ids) >= limits.max_seq_len:
        raise InvalidRequest(
            param,
            f"{param} has {len(ids)} tokens, but the context holds {limits.max_seq_len} with the answer",
        )
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"{param}.{index}", f"{param}.{index}: token ids are integers from 0 to {limits.vocab_size - 1}"
            )
    return list(ids)

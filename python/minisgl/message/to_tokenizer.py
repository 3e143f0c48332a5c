"""API server -> tokenizer worker."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from minisgl.core import SamplingParams
from minisgl.message.types import PackedIds, TextOptions


class TextPrompt(msgspec.Struct, frozen=True, tag=True):
    """Plain text, encoded with the special tokens that the model's tokenizer adds (BOS)."""

    text: str


class IdsPrompt(msgspec.Struct, frozen=True, tag=True):
    """Token ids, used as they are."""

    ids: PackedIds


class ChatPrompt(msgspec.Struct, frozen=True, tag=True):
    """A conversation for the model's chat template. The template writes the special tokens itself."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}


class Generate(msgspec.Struct, frozen=True, tag=True):
    """One prompt, answered once for each of `sequences` (n choices)."""

    sequences: list[int]
    seeds: list[int]  # one per sequence
    prompt: TextPrompt | IdsPrompt | ChatPrompt
    sampling: SamplingParams
    text: TextOptions
    priority: int = 0  # larger goes first


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client left: end these sequences."""

    sequences: list[int]


class Query(msgspec.Struct, frozen=True, tag=True):
    """Collect the counts of every process on the request's route."""

    query: int


ToTokenizer: TypeAlias = Generate | Abort | Query

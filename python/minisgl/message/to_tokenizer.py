"""API server -> tokenizer worker."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from minisgl.core import SamplingParams
from minisgl.message.engine_state import InspectState
from minisgl.message.types import Abort, FlushCache, PackedIds, StatsRequest, TextOptions


class TextPrompt(msgspec.Struct, frozen=True, tag=True):
    """Plain text, encoded with the special tokens that the model's tokenizer adds (BOS), or without."""

    text: str
    add_special_tokens: bool = True


class IdsPrompt(msgspec.Struct, frozen=True, tag=True):
    """Token ids, used as they are."""

    ids: PackedIds


class PairPrompt(msgspec.Struct, frozen=True, tag=True):
    """A query and a document whose relevance to it is asked, in the form that the reranker was trained on."""

    query: str
    document: str
    instruction: str | None = None  # None: the form's own


class ChatPrompt(msgspec.Struct, frozen=True, tag=True):
    """A conversation for the model's chat template. The template writes the special tokens itself."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True  # end with the beginning of an assistant's message
    continue_final_message: bool = False  # leave the last message open, to be written on


Prompt: TypeAlias = TextPrompt | IdsPrompt | ChatPrompt | PairPrompt


class GenerateOptions(msgspec.Struct, frozen=True):
    """Options that all sequences of an HTTP request share."""

    sampling: SamplingParams
    text: TextOptions
    priority: int = 0  # larger goes first
    truncate: int | None = None  # keep at most so many tokens of the prompt; -1: as many as fit
    keep_first: bool = False  # a prompt that is cut, or a pair's document, keeps its first tokens; False: its last
    fewer_tokens: bool = False  # than max_tokens, where the context holds no more; otherwise it is refused
    echo: bool = False  # answer with the prompt's text as well
    cache_salt: str = ""  # prefixes are shared between requests of the same salt only
    client: str = ""  # identifies the client, without its key: clients take turns where work is expensive


class Generate(GenerateOptions, frozen=True, kw_only=True, tag=True):
    """One prompt, answered once for each of `seq_ids` (n choices), by a pooling model with its vector."""

    seq_ids: list[int]
    seeds: list[int]  # one per sequence
    prompt: Prompt
    request_id: str = ""  # for logs


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Say the prompt's ids; nothing is generated."""

    query_id: int
    prompt: TextPrompt | ChatPrompt
    strings: bool = False  # and each token as the vocabulary writes it


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Say the text of these ids."""

    query_id: int
    ids: PackedIds


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Say what the model folder says about its tokenizer."""

    query_id: int


Query: TypeAlias = Encode | Decode | Describe | FlushCache | InspectState  # each gets one answer, with its id
ToTokenizer: TypeAlias = Generate | Abort | StatsRequest | Query

"""Messages of the API server to a tokenizer worker."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from minisgl.message.engine_state import StateRequest
from minisgl.message.packed_ids import PackedIds
from minisgl.message.shared import Abort, FlushCache, StatsRequest, TextOptions
from minisgl.sampling_params import SamplingParams

ConversationMessage: TypeAlias = dict[str, Any]  # in a form of OpenAI, or as chat templates read it


class TextPrompt(msgspec.Struct, frozen=True, tag=True):
    """Plain text, encoded with or without the special tokens that the model's tokenizer adds (BOS)."""

    text: str
    add_special_tokens: bool = True


class IdsPrompt(msgspec.Struct, frozen=True, tag=True):
    """Token ids, used as they are."""

    ids: PackedIds


class PairPrompt(msgspec.Struct, frozen=True, tag=True):
    """A query and a document, of which a reranker is to score the relevance."""

    query: str
    document: str
    instruction: str | None = None  # None: the default of the reranker's prompt


class ChatPrompt(msgspec.Struct, frozen=True, tag=True):
    """A conversation for the model's chat template. The template writes the special tokens itself."""

    messages: list[ConversationMessage]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True  # end with the beginning of an assistant's message
    continue_final_message: bool = False  # leave the last message open, so that the answer continues it


Prompt: TypeAlias = TextPrompt | IdsPrompt | ChatPrompt | PairPrompt


class GenerateOptions(msgspec.Struct, frozen=True):
    """Options that all sequences of an HTTP request share."""

    sampling: SamplingParams
    text: TextOptions
    priority: int = 0  # larger goes first
    truncate: int | None = None  # number of tokens of the prompt to keep at most; -1: as many as fit
    keep_first: bool = False  # a prompt that is cut, or a pair's document, keeps its first tokens; False: its last
    fewer_tokens: bool = False  # if the context is too short for max_tokens, generate fewer; False: refuse
    echo: bool = False  # the answer has the prompt's text as well
    cache_salt: str = ""  # prefixes are shared only between requests with the same salt
    client: str = ""  # identifies the client (not its key), so that clients take turns in the tokenizer worker


class Generate(GenerateOptions, frozen=True, kw_only=True, tag=True):
    """One prompt, answered once for each of `seq_ids` (n choices); a pooling model answers with a vector."""

    seq_ids: list[int]
    seeds: list[int]  # one per sequence
    prompt: Prompt
    request_id: str = ""  # for logs


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Return the prompt's ids; nothing is generated."""

    query_id: int
    prompt: TextPrompt | ChatPrompt
    strings: bool = False  # also return each token's string in the vocabulary


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Return the text of these ids."""

    query_id: int
    ids: PackedIds


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Return the tokenizer's configuration of the model folder."""

    query_id: int


Query: TypeAlias = Encode | Decode | Describe | FlushCache | StateRequest  # each gets one answer, which has its id
ToTokenizer: TypeAlias = Generate | Abort | StatsRequest | Query

"""Messages of the tokenizer workers and the detokenizer to the API server."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from minisgl.core import ErrorCause, FinishReason
from minisgl.message.engine_state import StateReport
from minisgl.message.logprobs import PackedLogprobs, PackedPositions
from minisgl.message.packed_ids import PackedIds
from minisgl.message.shared import Flushed, StatsReport

RefusalStatus: TypeAlias = Literal[400, 500, 503]  # HTTP's


class Echo(msgspec.Struct, frozen=True, array_like=True):
    """The prompt as text, if the request asks for it."""

    text: str
    first_token: bytes  # the UTF-8 text of the prompt's first token, which has no log-probability


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The prompt of these sequences is tokenized, valid and on its way to the scheduler."""

    seq_ids: list[int]
    prompt_ids: PackedIds
    echo: Echo | None = None
    prompt_end: str = ""  # last tokens of a conversation as text, which say where the answer begins


class Refused(msgspec.Struct, frozen=True, tag=True):
    """These sequences will not run, and no other message about them follows.

    With status 400, `field` and `message` say what is wrong with the request. With 503, `message` says what there is
    too much of at the moment. 500 is an internal error, which is in the log.
    """

    seq_ids: list[int]
    field: str = ""
    message: str = ""
    code: str | None = None  # OpenAI's name of the error, if it has one
    status: RefusalStatus = 400


class OutputDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ids and text that one sequence got in a step. Ids are sent even while their text is held back."""

    seq_id: int
    ids: PackedIds
    text: str
    finish: FinishReason | None = None  # set in exactly one delta, the last
    cached_tokens: int = 0  # in the last delta
    stop_reason: str | int | None = None  # in the last delta: the stop string or stop token that ended it
    logprobs: PackedPositions = b""  # one for each id, if asked for
    prompt_logprobs: PackedLogprobs | None = None  # in the first delta, if asked for: of all ids but the first
    cause: ErrorCause | None = None  # in the last delta: of an error, if it is one of these
    admitted: float | None = None  # in the last delta: when its first step was planned, by `perf_counter`
    vector: bytes = b""  # in the only delta of a pooled prompt: little-endian float32


class OutputDeltas(msgspec.Struct, frozen=True, tag=True):
    """Text of all sequences that got some in a step."""

    deltas: list[OutputDelta]


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """Answer to Encode: the ids."""

    query_id: int
    ids: PackedIds
    strings: bytes = b""  # JSON list of each token's string, if requested: a client gets it as it is


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """Answer to Decode: the text."""

    query_id: int
    text: str


class Described(msgspec.Struct, frozen=True, tag=True):
    """Answer to Describe: the tokenizer's configuration."""

    query_id: int
    config: dict[str, Any]


class Unanswered(msgspec.Struct, frozen=True, tag=True):
    """Answer to a query that failed, with the fields of `Refused`."""

    query_id: int
    field: str = ""
    message: str = ""
    status: RefusalStatus = 400


Reply: TypeAlias = Encoded | Decoded | Described | Flushed | StateReport | Unanswered
ToApi: TypeAlias = Accepted | Refused | OutputDeltas | StatsReport | Reply

"""Types that scheduler and engine share: the plan of a step, and its result; and a node of the prefix cache.

Pure: no torch, no I/O. Token ids are NumPy int32 arrays; lengths and positions count tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.sampling_params import SamplingFlags, SamplingParams

Int32Array: TypeAlias = NDArray[np.int32]
BoolArray: TypeAlias = NDArray[np.bool_]
IndexArray: TypeAlias = NDArray[np.intp]  # NumPy's index type: with other integers indexing takes four times as long
AnyArray: TypeAlias = NDArray[Any]

A = TypeVar("A")
B = TypeVar("B")

FinishReason = Literal["stop", "length", "abort", "error"]
# Causes of the finish reason error that users are told.
ErrorCause = Literal["no_allowed_token", "grammar_too_large", "grammar_unusable", "logits_not_finite"]

NO_TOKEN = -1  # sampled token of a row whose logits have a NaN or no finite maximum


class DeviceOutOfMemory(RuntimeError):
    """A step could not be executed because the device had too little memory. The device can still be used.

    The device's data of that step and of those launched after it is undefined: the rows of their slots, and the K and V
    of their tokens.
    """


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """Row of a request that enters a slot, with all data that the device needs of it; it is sent once."""

    slot: int
    token_ids: Int32Array  # all known tokens: the prompt, and after a retraction the output so far
    pages: Int32Array  # pages of the cached prefix, in order
    sampling: SamplingParams
    seed: int  # 64-bit seed of the sequence, derived from the request's seed and the choice's index
    prompt_len: int = 0  # number of the known tokens that are the prompt
    stop_ids: tuple[int, ...] = ()  # ids that end it, eos included, which are forbidden before sampling.min_tokens
    window_pages: Int32Array | None = None  # windowed pages of the cached prefix, if there is a windowed group


class ScoredTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens whose log-probabilities a step returns."""

    rows: Int32Array  # [n]: sampling rows whose new token is scored
    top: int  # number of alternatives to each
    prompt_lens: Int32Array  # [rows]: number of a row's tokens, from its first, that score the next prompt token
    prompt_top: int  # number of alternatives to each


@dataclass(frozen=True, slots=True)
class Logprobs(Generic[A]):
    """Log-probabilities (natural logarithms) at n positions: of the token there and of the k most likely ones.

    `A` is the type of array: tensors on the device, NumPy arrays on the host.
    """

    chosen: A  # float32[n]
    ranks: A  # int32[n]: 1 is the most likely
    top_ids: A  # int32[n, k], most likely first
    top: A  # float32[n, k]

    def map(self, convert: Callable[[A], B]) -> Logprobs[B]:
        """Return it with each array converted."""
        return Logprobs(convert(self.chosen), convert(self.ranks), convert(self.top_ids), convert(self.top))


@dataclass(frozen=True, slots=True)
class StepResult(Generic[A]):
    """Result of a step, on the device and then on the host. Its Batch says which log-probabilities there are."""

    tokens: A  # int32[S]: sampled tokens or NO_TOKEN, in the order of the rows that sample; none of a pooling model
    logprobs: Logprobs[A] | None = None  # for the tokens of `ScoredTokens.rows`
    prompt_logprobs: Logprobs[A] | None = None  # for the tokens of `ScoredTokens.prompt_lens`, row after row
    vectors: A | None = None  # float32[S, size] of a pooling model, in place of tokens
    seconds: float | None = None  # time of the step, if the device measures it; NaN if it waited for the host

    def map(self, convert: Callable[[A], B]) -> StepResult[B]:
        """Return it with each array converted."""
        return self.map_rest(convert(self.tokens), convert)

    def map_rest(self, tokens: B, convert: Callable[[A], B]) -> StepResult[B]:
        """Return it with these tokens and each other array converted."""
        output, prompt = self.logprobs, self.prompt_logprobs
        return StepResult(
            tokens,
            None if output is None else output.map(convert),
            None if prompt is None else prompt.map(convert),
            None if self.vectors is None else convert(self.vectors),
            self.seconds,
        )


PendingStep: TypeAlias = Callable[[], StepResult[AnyArray]]
"""Waits for a launched step and returns its result on the host; DeviceOutOfMemory if the step ran out of memory."""


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Plan of one step: rows of (slot, start position, query length), and the new rows and pages for the device.

    A row extends its sequence by `query_lens[i]` tokens from position `start_pos[i]`, which attend to all tokens before
    them. `needs_sample[i]` is True if the row reaches the last known token, so that the next one is sampled. The same
    plan drives every engine: CPU, CUDA, a captured graph, a simulation, and the other tensor-parallel ranks.
    """

    step: int
    slots: Int32Array  # [rows]
    start_pos: Int32Array  # [rows]
    query_lens: Int32Array  # [rows], each >= 1
    needs_sample: BoolArray  # [rows]
    new_pages: Int32Array  # [k, 3]: (slot, index in its page-table row, page); [k, 4]: and the windowed page
    new_rows: list[NewRow] = []
    flags: SamplingFlags = SamplingFlags(0)  # union over all rows that sample
    logprobs: ScoredTokens | None = None  # None: no log-probabilities are wanted
    # Rows (from, to) of recurrent states to copy before the forward, in order: slots and, after the scratch slot,
    # snapshots.
    state_copies: list[tuple[int, int]] = []

    @property
    def is_decode(self) -> bool:
        """True if every row extends by one token and samples."""
        return bool(self.needs_sample.all()) and int(self.query_lens.max()) == 1

    @property
    def constrained(self) -> bool:
        """True if a row that samples has a grammar, so that the sampling waits for the grammar bitmask."""
        return SamplingFlags.CONSTRAINED in self.flags

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


class CacheNode(msgspec.Struct, frozen=True):
    """Node of the tree of cached prefixes: a run of pages that all prefixes through it share."""

    first: int  # number of its first page, which a split or an evicted tail does not change
    last: int  # number of its last page
    parent: int | None  # last page of the node above; None if it is a child of the root
    pages: int
    end: int  # tokens of the whole prefix
    locks: int  # running requests that hold it


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the number of pages that hold this many tokens."""
    return math.ceil(num_tokens / page_size)

"""Answers of LLM, assembled from the detokenizer's deltas."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from minisgl.core import ErrorCause, FinishReason
from minisgl.message.logprobs import PositionLogprobs, unpack_positions
from minisgl.message.packed_ids import unpack_ids
from minisgl.message.to_api import OutputDelta
from minisgl.sampling_params import SamplingParams


class Completion(TypedDict):
    """One prompt's answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    cached_tokens: int  # prompt tokens found in the prefix cache
    logprobs: NotRequired[list[PositionLogprobs]]  # one for each token, if requested
    prompt_logprobs: NotRequired[list[PositionLogprobs]]  # one for each prompt token but the first, if requested


class OutputCollector:
    """Collects the deltas of one sequence; the last one sets `completion`.

    The deltas are then joined and freed, while the device is working on other sequences.
    """

    completion: Completion
    vector: bytes = b""  # vector of a pooled prompt: little-endian float32
    cause: ErrorCause | None = None  # of an error, if it is one of these

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._texts: list[str] = []
        self._ids: list[bytes] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: list[PositionLogprobs] = []

    def take(self, delta: OutputDelta) -> None:
        self._texts.append(delta.text)
        self._ids.append(delta.ids)
        if delta.logprobs:
            self._logprobs += unpack_positions([delta.logprobs])
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs += delta.prompt_logprobs
        if delta.finish is not None:
            self.vector, self.cause = delta.vector, delta.cause
            self.completion = self._complete(delta.finish, delta.cached_tokens)
            self._texts.clear()
            self._ids.clear()

    def _complete(self, finish_reason: FinishReason, cached_tokens: int) -> Completion:
        completion = Completion(
            text="".join(self._texts),
            token_ids=unpack_ids(b"".join(self._ids)).tolist(),
            finish_reason=finish_reason,
            cached_tokens=cached_tokens,
        )
        if self._sampling.logprobs is not None:
            completion["logprobs"] = self._logprobs
        if self._sampling.prompt_logprobs is not None:
            completion["prompt_logprobs"] = self._prompt_logprobs
        return completion

"""SGLang's form of POST /generate: translates its body into a `GenerateBody`, and writes its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.limits import Limits
from minisgl.message.logprobs import PositionLogprobs, TokenLogprob
from minisgl.message.packed_ids import unpack_ids
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.answers.answer import Usage, Writer, server_sent_event
from minisgl.server.api.answers.completions import generate_job
from minisgl.server.api.answers.large_json import JsonList, encode_large, slices
from minisgl.server.api.answers.logprob_forms import token_text, value
from minisgl.server.api.bodies.read_body import validate
from minisgl.server.api.bodies.route_bodies import GenerateBody, SglangBody
from minisgl.server.api.http.errors import under_clients_names
from minisgl.server.api.requests.open_request import Delta, Job, OpenRequest

RENAMED = {  # SGLang's name of a sampling parameter -> ours
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
DEFAULTS = {"max_tokens": 128, "temperature": 1.0}


def generate_body(fields: dict[str, Any]) -> type[GenerateBody | SglangBody]:
    """Return the type of a body of /generate: SGLang's form names the prompt `text` or `input_ids`."""
    is_sglang = "prompt" not in fields and not fields.keys().isdisjoint(("text", "input_ids"))
    return SglangBody if is_sglang else GenerateBody


def sglang_job(body: SglangBody, limits: Limits, sampling_defaults: Mapping[str, Any]) -> Job:
    """Return the job of a body; InvalidRequest naming the field that is wrong.

    The model's `sampling_defaults` take precedence over SGLang's.
    """
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text", "text or input_ids must be given, and not both")
    given = {name: field for name, field in body.sampling_params.items() if field is not None}
    names = {RENAMED.get(name, name): f"sampling_params.{name}" for name in given}
    names |= {"prompt": "input_ids" if body.text is None else "text", "logprobs": "top_logprobs_num"}
    fields = DEFAULTS | dict(sampling_defaults) | {RENAMED.get(name, name): field for name, field in given.items()}
    fields |= {"prompt": body.input_ids if body.text is None else body.text, "priority": body.priority}
    if body.extra_key is not None:
        fields["cache_salt"] = body.extra_key
    if body.return_logprob:
        fields["logprobs"] = body.top_logprobs_num
        if body.logprob_start_len >= 0:
            fields["prompt_logprobs"] = body.top_logprobs_num
    with under_clients_names(names):
        return generate_job(validate(fields, GenerateBody, limits), limits).under_names(names)


ScoredToken = tuple[float | None, int, str | None]  # log-probability, id, text
# Entries of lists that are `JsonList`s.
EncodedToken = Annotated[msgspec.Raw, msgspec.Meta(description="[log-probability, id, text]")]
EncodedTokens = Annotated[msgspec.Raw, msgspec.Meta(description="list of [log-probability, id, text], or null")]


class Meta(msgspec.Struct, frozen=True):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float  # seconds
    input_token_logprobs: list[EncodedToken] | UnsetType = UNSET
    input_top_logprobs: list[EncodedTokens] | UnsetType = UNSET
    output_token_logprobs: list[EncodedToken] | UnsetType = UNSET
    output_top_logprobs: list[EncodedTokens] | UnsetType = UNSET


class SglangAnswer(msgspec.Struct, frozen=True):
    text: str
    output_ids: list[int]
    meta_info: Meta


class SglangWriter(Writer):
    """Writes SGLang's answers; each event of a stream has the whole answer so far."""

    keeps_logprobs: ClassVar[bool] = True
    repeats_logprobs: ClassVar[bool] = True

    def __init__(self, body: SglangBody) -> None:
        self.id = body.rid or uuid.uuid4().hex
        self._body = body
        self._start = time.perf_counter()
        self._text = ""
        self._ids: list[int] = []
        # Encoded once, though each event repeats them.
        self._chosen, self._top = JsonList(), JsonList()
        self._prompt_chosen, self._prompt_top = JsonList(), JsonList()

    def begin(self, request: OpenRequest) -> None:
        super().begin(request)
        if self._body.logprob_start_len == 0:  # the prompt's first token has no probability, but an entry
            first: ScoredToken = (None, int(unpack_ids(request.prompts[0].prompt_ids)[0]), None)
            self._prompt_chosen.add([first])
            self._prompt_top.add([None])

    def events(self, delta: Delta) -> bytes:
        return server_sent_event(self._take(delta))

    def last_events(self, usage: Usage) -> bytes:  # noqa: ARG002 - every event has it
        return b""

    def body(self, choices: list[Delta], usage: Usage) -> bytes:  # noqa: ARG002
        (choice,) = choices
        return encode_large(self._take(choice))

    def _take(self, delta: Delta) -> SglangAnswer:
        self._text += delta.text
        self._ids += delta.token_ids
        self._encode_scores(delta.logprobs, self._chosen, self._top)
        if (start := self._body.logprob_start_len) >= 0:
            scored = islice(delta.prompt_logprobs, max(start - 1, 0), None)
            self._encode_scores(scored, self._prompt_chosen, self._prompt_top)
        request = self._request
        meta = Meta(
            self.id,
            self._finish_reason(delta),
            request.prompt_tokens,
            request.completion_tokens,
            request.cached_tokens,
            time.perf_counter() - self._start,
            **self._scores(),
        )
        return SglangAnswer(self._text, self._ids, meta)

    def _finish_reason(self, delta: Delta) -> dict[str, Any] | None:
        match delta.finish:
            case None:
                return None
            case "length":
                return {"type": "length", "length": self._request.completion_tokens}
            case reason:
                return {"type": reason, "matched": delta.ended_by}

    def _scores(self) -> dict[str, Any]:
        """Return the fields of `Meta` with log-probabilities, if requested."""
        if not self._body.return_logprob:
            return {}
        scores = {"input_token_logprobs": self._prompt_chosen, "output_token_logprobs": self._chosen}
        if self._body.top_logprobs_num > 0:
            scores |= {"input_top_logprobs": self._prompt_top, "output_top_logprobs": self._top}
        return scores

    def _encode_scores(self, positions: Iterable[PositionLogprobs], chosen: JsonList, top: JsonList) -> None:
        for some in slices(positions):
            chosen.add([self._scored_token(position.chosen) for position in some])
            top.add([[self._scored_token(token) for token in position.top] for position in some])

    def _scored_token(self, token: TokenLogprob) -> ScoredToken:
        return value(token), token.token, token_text(token.text) if self._body.return_text_in_logprobs else None

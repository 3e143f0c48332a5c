"""POST /v1/completions, and /generate: Mini-SGLang's simple interface of one prompt and one answer.

Each has a function from its body to a job, and a writer of its answer; both writers share `ChoiceText`.
"""

from __future__ import annotations

import time
import uuid
from itertools import chain
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.core import FinishReason
from minisgl.limits import Limits
from minisgl.message.packed_ids import unpack_ids
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.answers.answer import Usage, Writer, server_sent_event, usage_of
from minisgl.server.api.answers.large_json import encode_large
from minisgl.server.api.answers.logprob_forms import (
    PromptLogprobs,
    TextLogprobs,
    TextLogprobsWriter,
    mean_logprob,
    prompt_logprobs,
)
from minisgl.server.api.bodies.plain_prompts import parse_prompt, parse_prompts
from minisgl.server.api.bodies.route_bodies import CompletionBody, GenerateBody
from minisgl.server.api.requests.open_request import Delta, Job, OpenRequest


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class TextCompletion(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    """Answer of /v1/completions: the whole, or a chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class Generated(msgspec.Struct, frozen=True):
    """Answer of /generate: the whole, or a chunk of a stream."""

    id: str
    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET


class Text(NamedTuple):
    """Text of a choice, with log-probabilities and ids, in the order of the response objects' fields."""

    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


NO_TEXT = Text("")


class ChoiceText:
    """One choice: makes the `Text` of each delta."""

    def __init__(self, body: CompletionBody | GenerateBody, request: OpenRequest, index: int) -> None:
        prompt = request.prompts[index // request.job.n]
        self._body = body
        self._prompt_ids = prompt.prompt_ids
        self._echo = prompt.echo
        self._logprobs = (
            None
            if body.logprobs is None
            else TextLogprobsWriter(body.logprobs, skip_special_tokens=body.skip_special_tokens)
        )
        self._tells_prompt = self._echo is not None or body.prompt_logprobs is not None or body.return_token_ids
        self._tells_tokens = self._logprobs is not None or body.return_token_ids

    def take(self, delta: Delta) -> Text | None:
        """Return the text of a delta, the first time with the prompt's; None if there is nothing to write.

        Ids and log-probabilities are written as they come, even if the tokens' text is still held back.
        """
        if self._tells_prompt:
            self._tells_prompt = False
            return self._first(delta)
        if self._tells_tokens and (ids := delta.token_ids):
            logprobs = None if self._logprobs is None else TextLogprobs.join(self._logprobs.write(delta.logprobs))
            return Text(delta.text, logprobs, token_ids=ids if self._body.return_token_ids else UNSET)
        return Text(text) if (text := delta.text) else None

    def _first(self, delta: Delta) -> Text:
        body, echo, writer = self._body, self._echo, self._logprobs
        logprobs = None
        if writer is not None:
            prompt = () if echo is None else writer.prompt(echo.first_token, echo.text, delta.prompt_logprobs)
            logprobs = TextLogprobs.join(chain(prompt, writer.write(delta.logprobs)))
        return Text(
            delta.text if echo is None else echo.text + delta.text,
            logprobs,
            UNSET if body.prompt_logprobs is None else prompt_logprobs(delta.prompt_logprobs, body.prompt_logprobs),
            delta.token_ids if body.return_token_ids else UNSET,
            unpack_ids(self._prompt_ids).tolist() if body.return_token_ids else UNSET,
        )


def completion_job(body: CompletionBody, limits: Limits) -> Job:
    """Return the job of a body, or InvalidRequest."""
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens", "max_tokens must be at least 1, unless echo or prompt_logprobs is set")
    sampling = body.sampling(limits)
    truncate = body.tokens_to_keep(limits)
    cut = truncate is not None
    return Job(
        sampling,
        body.text_options(continues=True),
        body.priority,
        prompts=parse_prompts(body.prompt, limits, add_special_tokens=body.add_special_tokens, cut=cut),
        n=body.num_choices,
        truncate=truncate,
        echo=body.echo,
        field_names=body.grammar_names,
        cache_salt=body.salt,
    )


class CompletionWriter(Writer):
    """Writes text_completion objects: the whole answer, or one for each event."""

    def __init__(self, model: str, body: CompletionBody) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._include_usage = body.wants_usage()
        self._continuous_usage = body.wants_continuous_usage()
        self._choices: list[ChoiceText] = []

    def begin(self, request: OpenRequest) -> None:
        super().begin(request)
        self._choices = [ChoiceText(self._body, request, index) for index in range(request.job.num_choices)]

    def events(self, delta: Delta) -> bytes:
        text = self._choices[delta.index].take(delta)
        events = [] if text is None else [self._event(TextChoice(delta.index, *text))]
        if delta.finish is not None:
            end = TextChoice(delta.index, "", finish_reason=delta.finish, stop_reason=delta.stop_reason)
            events.append(self._event(end))
        return b"".join(events)

    def _event(self, choice: TextChoice) -> bytes:
        usage: Usage | UnsetType | None = None if self._include_usage else UNSET
        if self._continuous_usage:
            usage = usage_of(self._request)
        return server_sent_event(TextCompletion(self.id, self._created, self._model, [choice], usage))

    def last_events(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return server_sent_event(TextCompletion(self.id, self._created, self._model, [], usage))

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        written = [
            TextChoice(
                index,
                *(self._choices[delta.index].take(delta) or NO_TEXT),
                finish_reason=delta.finish,
                stop_reason=delta.stop_reason,
            )
            for index, delta in enumerate(self._best(choices))
        ]
        return encode_large(TextCompletion(self.id, self._created, self._model, written, usage))

    def _best(self, choices: list[Delta]) -> list[Delta]:
        """Return the n most likely answers to each prompt, best first; if there are only n, all in their order."""
        made, wanted = self._body.num_choices, self._body.n
        if made == wanted:
            return choices
        best: list[Delta] = []
        for start in range(0, len(choices), made):
            ranked = sorted(choices[start : start + made], key=lambda delta: -mean_logprob(delta.logprobs))
            best += ranked[:wanted]
        return best


def generate_job(body: GenerateBody, limits: Limits) -> Job:
    """Return the job of a body, or InvalidRequest."""
    sampling = body.sampling(limits)
    truncate = body.tokens_to_keep(limits)
    return Job(
        sampling,
        body.text_options(continues=True),
        body.priority,
        prompts=[parse_prompt(body.prompt, limits, cut=truncate is not None)],
        field_names=body.grammar_names,
        truncate=truncate,
        cache_salt=body.salt,
    )


class GenerateWriter(Writer):
    """Writes `Generated` objects: the whole answer, or one for each event."""

    def __init__(self, body: GenerateBody) -> None:
        self._body = body
        self.id = f"gen-{uuid.uuid4().hex}"

    def begin(self, request: OpenRequest) -> None:
        self._text = ChoiceText(self._body, request, 0)

    def events(self, delta: Delta) -> bytes:
        if delta.finish is not None:
            self._end = delta
        text = self._text.take(delta)
        return b"" if text is None else server_sent_event(Generated(self.id, *text))

    def last_events(self, usage: Usage) -> bytes:
        end = Generated(self.id, "", finish_reason=self._end.finish, stop_reason=self._end.stop_reason, usage=usage)
        return server_sent_event(end)

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        (choice,) = choices
        text = self._text.take(choice) or NO_TEXT
        return encode_large(
            Generated(self.id, *text, finish_reason=choice.finish, stop_reason=choice.stop_reason, usage=usage)
        )

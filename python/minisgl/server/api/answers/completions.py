"""POST /v1/completions: from its body to a job, and from what the engine gives to its answer."""

from __future__ import annotations

import time
import uuid

from msgspec import UNSET, UnsetType
from msgspec.json import encode

from minisgl.core import InvalidRequest
from minisgl.limits import Limits
from minisgl.server.api.answers.answer import usage_of
from minisgl.server.api.answers.choice_text import NO_TEXT, ChoiceText
from minisgl.server.api.answers.logprobs import mean_logprob
from minisgl.server.api.answers.responses import TextChoice, TextCompletion, Usage, server_sent_event
from minisgl.server.api.bodies.prompts import parse_prompts
from minisgl.server.api.bodies.schema import CompletionBody
from minisgl.server.api.requests.delta import Delta
from minisgl.server.api.requests.open_request import Job, OpenRequest


def completion_job(body: CompletionBody, limits: Limits) -> Job:
    """What the body asks of the engine, or InvalidRequest."""
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens", "max_tokens must be at least 1, unless echo is set")
    sampling = body.sampling(limits)
    truncate = body.truncation(limits)
    return Job(
        parse_prompts(body.prompt, limits, add_special_tokens=body.add_special_tokens, cut=truncate is not None),
        body.num_choices,
        sampling,
        body.text_options(continues=True),
        body.priority,
        truncate=truncate,
        echo=body.echo,
        field_names=body.grammar_names,
        cache_salt=body.salt,
    )


class CompletionWriter:
    """Writes text_completion objects: the whole answer, or one event a chunk."""

    def __init__(self, model: str, body: CompletionBody) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._include_usage = body.wants_usage()
        self._continuous_usage = body.wants_continuous_usage()
        self._choices: list[ChoiceText] = []

    def begin(self, request: OpenRequest) -> None:
        self._request = request
        self._choices = [ChoiceText(self._body, request, index) for index in range(request.job.num_choices)]

    def events(self, delta: Delta) -> bytes:
        text = self._choices[delta.index].take(delta)
        data = b"" if text is None else self._event(TextChoice(delta.index, *text))
        if delta.finish is not None:
            end = TextChoice(delta.index, "", finish_reason=delta.finish, stop_reason=delta.stop_reason)
            data += self._event(end)
        return data

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
        return encode(TextCompletion(self.id, self._created, self._model, written, usage))

    def _best(self, choices: list[Delta]) -> list[Delta]:
        """Of the answers to each prompt the n that are most likely, the best first; all, in order, if they are n."""
        made, wanted = self._body.num_choices, self._body.n
        if made == wanted:
            return choices
        best: list[Delta] = []
        for start in range(0, len(choices), made):
            ranked = sorted(choices[start : start + made], key=lambda delta: -mean_logprob(delta.logprobs))
            best += ranked[:wanted]
        return best

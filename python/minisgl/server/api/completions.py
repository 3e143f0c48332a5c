"""POST /v1/completions: from its body to a job, and from what the engine gives to its answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET
from msgspec.json import encode

from minisgl.core import InvalidRequest, Limits
from minisgl.message.to_tokenizer import TextPrompt
from minisgl.message.types import TextOptions
from minisgl.server.api.client import Delta, Job, OpenRequest
from minisgl.server.api.prompts import parse_prompts
from minisgl.server.api.responses import TextChoice, TextCompletion, Usage, server_sent_event
from minisgl.server.api.schema import CompletionBody


def completion_job(body: CompletionBody, limits: Limits) -> Job:
    """What the body asks of the engine, or InvalidRequest."""
    if body.best_of not in (None, body.n):
        raise InvalidRequest("best_of", "best_of is not supported yet, unless it equals n")
    sampling = body.sampling(limits)
    prompts = parse_prompts(body.prompt, limits)
    return Job(prompts, body.n, sampling, TextOptions(sampling.stop, body.skip_special_tokens), body.priority)


def echoes(body: CompletionBody, job: Job) -> list[str]:
    """For every choice, what its text begins with: its prompt if `echo` is set."""
    if not body.echo:
        return [""] * job.num_choices
    texts = [prompt.text for prompt in job.prompts if isinstance(prompt, TextPrompt)]
    if len(texts) < len(job.prompts):
        raise InvalidRequest("echo", "echo is not supported yet for prompts of token ids")
    return [text for text in texts for _ in range(job.n)]


class CompletionWriter:
    """Writes text_completion objects: the whole answer, or one event a chunk."""

    def __init__(self, model: str, echoes: Sequence[str], *, include_usage: bool) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._echoes = list(echoes)  # what has not been written yet
        self._include_usage = include_usage

    def begin(self, request: OpenRequest) -> None:
        """It needs nothing of them."""

    def events(self, delta: Delta) -> bytes:
        data = b""
        if text := self._text(delta):
            data = self._event(TextChoice(delta.index, text))
        if delta.finish is not None:
            data += self._event(TextChoice(delta.index, "", delta.finish, delta.stop_reason))
        return data

    def _text(self, delta: Delta) -> str:
        echo, self._echoes[delta.index] = self._echoes[delta.index], ""
        return echo + delta.text

    def _event(self, choice: TextChoice) -> bytes:
        usage = None if self._include_usage else UNSET
        return server_sent_event(TextCompletion(self.id, self._created, self._model, [choice], usage))

    def last_events(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return server_sent_event(TextCompletion(self.id, self._created, self._model, [], usage))

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        written = [
            TextChoice(choice.index, self._text(choice), choice.finish, choice.stop_reason) for choice in choices
        ]
        return encode(TextCompletion(self.id, self._created, self._model, written, usage))

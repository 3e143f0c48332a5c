"""POST /generate, Mini-SGLang's simple interface: one prompt, one answer. A stream's last event has the usage."""

from __future__ import annotations

import uuid

from msgspec.json import encode

from minisgl.limits import Limits
from minisgl.server.api.answers.choice_text import NO_TEXT, ChoiceText
from minisgl.server.api.answers.responses import Generated, Usage, server_sent_event
from minisgl.server.api.bodies.prompts import parse_prompt
from minisgl.server.api.bodies.schema import GenerateBody
from minisgl.server.api.requests.delta import Delta
from minisgl.server.api.requests.open_request import Job, OpenRequest


def generate_job(body: GenerateBody, limits: Limits) -> Job:
    """What the body asks of the engine, or InvalidRequest."""
    sampling = body.sampling(limits)
    truncate = body.truncation(limits)
    prompt = parse_prompt(body.prompt, limits, cut=truncate is not None)
    return Job(
        [prompt],
        1,
        sampling,
        body.text_options(continues=True),
        body.priority,
        field_names=body.grammar_names,
        truncate=truncate,
        cache_salt=body.salt,
    )


class GenerateWriter:
    """Writes `Generated` objects: the whole answer, or one event a chunk."""

    def __init__(self, body: GenerateBody) -> None:
        self._body = body
        self.id = f"gen-{uuid.uuid4().hex}"
        self._end: Delta | None = None

    def begin(self, request: OpenRequest) -> None:
        self._text = ChoiceText(self._body, request, 0)

    def events(self, delta: Delta) -> bytes:
        if delta.finish is not None:
            self._end = delta
        text = self._text.take(delta)
        return b"" if text is None else server_sent_event(Generated(self.id, *text))

    def last_events(self, usage: Usage) -> bytes:
        assert self._end is not None
        end = Generated(self.id, "", finish_reason=self._end.finish, stop_reason=self._end.stop_reason, usage=usage)
        return server_sent_event(end)

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        (choice,) = choices
        text = self._text.take(choice) or NO_TEXT
        return encode(
            Generated(self.id, *text, finish_reason=choice.finish, stop_reason=choice.stop_reason, usage=usage)
        )

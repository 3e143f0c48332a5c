"""POST /generate, Mini-SGLang's simple interface: one prompt, one answer. A stream's last event has the usage."""

from __future__ import annotations

import uuid

from msgspec.json import encode

from minisgl.core import Limits
from minisgl.message.types import TextOptions
from minisgl.server.api.client import Delta, Job, OpenRequest
from minisgl.server.api.prompts import parse_prompt
from minisgl.server.api.responses import Generated, Usage, server_sent_event
from minisgl.server.api.schema import GenerateBody


def generate_job(body: GenerateBody, limits: Limits) -> Job:
    """What the body asks of the engine, or InvalidRequest."""
    sampling = body.sampling(limits)
    prompt = parse_prompt(body.prompt, limits)
    return Job([prompt], 1, sampling, TextOptions(sampling.stop, body.skip_special_tokens), body.priority)


class GenerateWriter:
    """Writes `Generated` objects: the whole answer, or one event a chunk."""

    def __init__(self) -> None:
        self.id = f"gen-{uuid.uuid4().hex}"
        self._end: Delta | None = None

    def begin(self, request: OpenRequest) -> None:
        """It needs nothing of them."""

    def events(self, delta: Delta) -> bytes:
        if delta.finish is not None:
            self._end = delta
        text = delta.text
        return server_sent_event(Generated(self.id, text)) if text else b""

    def last_events(self, usage: Usage) -> bytes:
        assert self._end is not None
        return server_sent_event(Generated(self.id, "", self._end.finish, self._end.stop_reason, usage))

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        (choice,) = choices
        return encode(Generated(self.id, choice.text, choice.finish, choice.stop_reason, usage))

"""What completions and /generate tell of one choice besides its end: text, tokens, log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, UnsetType

from minisgl.message.types import unpack_ids
from minisgl.server.api.answers.logprobs import TextLogprobsWriter, prompt_logprobs
from minisgl.server.api.answers.responses import PromptLogprob, TextLogprobs
from minisgl.server.api.bodies.schema import CompletionBody, GenerateBody
from minisgl.server.api.requests.delta import Delta
from minisgl.server.api.requests.open_request import OpenRequest


class Text(NamedTuple):
    """In the order of the fields of the response objects."""

    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


NO_TEXT = Text("")


class ChoiceText:
    """One choice's way from deltas to what is told of them."""

    def __init__(self, body: CompletionBody | GenerateBody, request: OpenRequest, index: int) -> None:
        prompt = index // request.job.n
        self._body = body
        self._prompt_ids = request.prompt_ids[prompt]
        self._echo = request.echoes.get(prompt)
        self._logprobs = (
            None
            if body.logprobs is None
            else TextLogprobsWriter(body.logprobs, skip_special_tokens=body.skip_special_tokens)
        )
        self._tells_prompt = self._echo is not None or body.prompt_logprobs is not None or body.return_token_ids
        self._tells_tokens = self._logprobs is not None or body.return_token_ids

    def take(self, delta: Delta) -> Text | None:
        """What there is to tell, at first also of the prompt. None: nothing.

        Tokens whose text is held back are told before it.
        """
        if self._tells_prompt:
            self._tells_prompt = False
            return self._first(delta)
        if self._tells_tokens and (ids := delta.token_ids):
            logprobs = None if self._logprobs is None else self._logprobs.write(delta.logprobs)
            return Text(delta.text, logprobs, token_ids=ids if self._body.return_token_ids else UNSET)
        return Text(text) if (text := delta.text) else None

    def _first(self, delta: Delta) -> Text:
        body, echo, writer = self._body, self._echo, self._logprobs
        logprobs = None
        if writer is not None:
            parts = [] if echo is None else [writer.prompt(echo.first_token, echo.text, delta.prompt_logprobs)]
            logprobs = TextLogprobs.join([*parts, writer.write(delta.logprobs)])
        return Text(
            delta.text if echo is None else echo.text + delta.text,
            logprobs,
            UNSET if body.prompt_logprobs is None else prompt_logprobs(delta.prompt_logprobs, body.prompt_logprobs),
            delta.token_ids if body.return_token_ids else UNSET,
            unpack_ids(self._prompt_ids).tolist() if body.return_token_ids else UNSET,
        )

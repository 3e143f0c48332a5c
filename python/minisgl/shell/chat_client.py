"""Client of any OpenAI-compatible server: its models' names, and streamed chat completions."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import msgspec

CONNECT_SECONDS = 10.0


class ChatError(Exception):
    """The server cannot be reached, or refuses. The text is one line for the user."""


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = "the server gives no reason"


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class AnswerChunk(msgspec.Struct, frozen=True):
    """Content of one event."""

    text: str = ""
    reasoning: str = ""  # only from servers that separate it
    finish: str | None = None
    usage: Usage | None = None


class ChatClient:
    """A connection to `base_url` (with its /v1). All methods raise ChatError."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url = base_url.rstrip("/")
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=not _is_local(self._base_url),  # a proxy cannot reach a server on this machine
        )

    async def models(self) -> list[str]:
        """Return the names of the models that the server serves."""
        try:
            response = await self._http.get(f"{self._base_url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise _refusal(response.status_code, response.content)
        try:
            return [model.id for model in msgspec.json.decode(response.content, type=_Models).data]
        except msgspec.DecodeError as error:
            raise ChatError(f"{self._base_url}/models is not an OpenAI API: {error}") from error

    async def chat(self, body: dict[str, Any]) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the answer as it comes. Leaving early closes the connection, which aborts the request at the server."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", f"{self._base_url}/chat/completions", json=body) as response:
                if not response.is_success:
                    raise _refusal(response.status_code, await response.aread())
                async for data in _event_data(response.aiter_bytes()):
                    yield _chunk(data)
        except httpx.RemoteProtocolError as error:
            raise ChatError("the server closed the connection in the middle of its answer") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        await self._http.aclose()

    def _unreachable(self, error: Exception) -> ChatError:
        return ChatError(f"cannot reach {self._base_url}: {error or type(error).__name__}")


async def _event_data(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event up to [DONE]. Lines end at newlines alone: JSON may hold U+2028."""
    buffer = b""
    async for block in blocks:
        *lines, buffer = (buffer + block).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield data
    raise ChatError("the server closed the connection in the middle of its answer")


def _chunk(data: bytes) -> AnswerChunk:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise ChatError(f"the server sent something else than a chat completion: {error}") from error
    if event.error is not None:
        raise ChatError(event.error.message)
    if not event.choices:
        return AnswerChunk(usage=event.usage)
    choice = event.choices[0]
    return AnswerChunk(
        choice.delta.content or "", choice.delta.reasoning_content or "", choice.finish_reason, event.usage
    )


def _refusal(status: int, content: bytes) -> ChatError:
    try:
        return ChatError(msgspec.json.decode(content, type=_ErrorBody).error.message)
    except msgspec.DecodeError:
        return ChatError(f"the server answers with HTTP status {status}")


def _is_local(url: str) -> bool:
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL:
        return False  # a wrong address is reported when it is used
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified

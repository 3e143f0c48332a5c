"""Errors in the form that clients get: OpenAI's error object, or Anthropic's on its routes, never an internal text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from minisgl.core import ErrorCause
from minisgl.sampling_params import CONTEXT_LENGTH_EXCEEDED, MAX_GRAMMARS_BYTES, InvalidRequest
from minisgl.server.api.http.request_head import speaks_anthropic

RETRY_AFTER_SECONDS = 1
MAX_CHARS = 8192  # of an error's message: a name that the client made may be as long as a body
MAX_PARAM_CHARS = 1024
NOT_FINITE = "the model's logits are NaN or infinite, so no token can be chosen"
NO_RETRY = {"x-should-retry": "false"}  # the same request would end in the same way


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


ANTHROPIC_TYPES = {  # type of an error by its status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
PROMPT_TOO_LONG = "prompt is too long: "  # Anthropic's clients look for these words, and shorten the conversation


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's error object. Its stream's error event is the same."""

    error: AnthropicErrorDetail
    request_id: str


class ApiError(Exception):
    """An answer that is an error: the HTTP status and OpenAI's error object. `param` is the field's dotted name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _cut(message, MAX_CHARS)
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, type, None if param is None else _cut(param, MAX_PARAM_CHARS), code)
        # OpenAI's clients repeat a request after these, unless they are told not to.
        retryable = status in (408, 409, 429) or status >= 500
        self.headers = {**(headers or {}), **({} if retryable else NO_RETRY)}

    def body(self) -> bytes:
        """Return OpenAI's error object."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def anthropic_body(self, request_id: str) -> bytes:
        """Return Anthropic's error object."""
        default = "invalid_request_error" if self.status < 499 else "api_error"
        prefix = PROMPT_TOO_LONG if self.detail.code == CONTEXT_LENGTH_EXCEEDED else ""
        detail = AnthropicErrorDetail(ANTHROPIC_TYPES.get(self.status, default), prefix + self.detail.message)
        return msgspec.json.encode(AnthropicErrorBody(detail, request_id))

    def response(self, scope: Scope) -> Response:
        """Return the error in the shape that this request's client reads."""
        return Response(self.body_for(scope), self.status, self.headers, media_type="application/json")

    def body_for(self, scope: Scope) -> bytes:
        if not speaks_anthropic(scope):
            return self.body()
        return self.anthropic_body(scope["state"]["request_id"])


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def invalid_request(error: InvalidRequest, names: Mapping[str, str] | None = None) -> ApiError:
    """Return the error of a field in which the client sent something wrong, under the client's name of the field."""
    error = renamed(error, names or {})
    return ApiError(400, error.message, param=error.field, code=error.code)


def worker_failed(status: int, message: str) -> ApiError:
    """Return the error if a worker could not answer: 503 if it has too much to do, 500 if it is in its log."""
    return _unavailable(f"{message}; try again later", "overloaded") if status == 503 else internal_error()


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error under the client's name of the field: the first part of a dotted name is looked up."""
    head, dot, rest = error.field.partition(".")
    name = names.get(head, head) + dot + rest
    message = error.message
    if message.startswith(f"{error.field} "):
        message = name + message.removeprefix(error.field)
    return InvalidRequest(name, message, error.code)


@contextmanager
def under_clients_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors: for bodies of another API that are translated before they are checked."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, names) from None


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than the limit of {limit} bytes", code="request_too_large")


def too_many_values(limit: str) -> ApiError:
    return ApiError(413, f"the request body has more than the limit of {limit}", code="request_too_large")


def head_too_large(limit: int) -> ApiError:
    message = f"the request's head, its line and headers, is larger than the limit of {limit} bytes"
    return ApiError(431, message, code="head_too_large")


def model_not_found(model: str, served: str) -> ApiError:
    message = f"the model {model[:MAX_PARAM_CHARS]!r} does not exist; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _unavailable(message: str, code: str) -> ApiError:
    """Return a 503 that tells the client to retry soon."""
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return ApiError(503, message, type="server_error", code=code, headers=headers)


def overloaded(limit: int) -> ApiError:
    return _unavailable(f"the server is full: it takes {limit} sequences at a time; try again later", "overloaded")


def too_many_bytes(limit: int) -> ApiError:
    """Return the error if all held bodies together are too large, until other requests have been answered."""
    return _unavailable(f"the server holds {limit} bytes of requests, as many as it may; try again later", "overloaded")


def too_many_logprobs(limit: int) -> ApiError:
    """Return the error if all answers together hold too many log-probabilities, until others have been written."""
    held = f"the server holds {limit} log-probabilities of answers, as many as it may"
    return _unavailable(f"{held}; ask for fewer at a time, or for a stream", "overloaded")


def store_failed() -> ApiError:
    """Return the error if stored responses cannot be read or deleted, for instance because the disk is full."""
    return _unavailable("the stored responses cannot be accessed at the moment", "response_store_failed")


def shutting_down(reason: str | None) -> ApiError:
    text = "the server is shutting down"
    return _unavailable(f"{text}: {reason}" if reason else text, "shutting_down")


def unauthorized(wanted: str) -> ApiError:
    """Return the error of a missing or wrong key. It begins with OpenAI's text, which clients look for."""
    text = f"Incorrect API key provided: {wanted}"
    return ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def foreign_origin(origin: str | None) -> ApiError:
    """Return the error of a web page from another origin; `origin` is None if the browser does not name it."""
    page = "another site" if origin is None else f"the origin {origin:.200}"
    message = f"web pages of {page} may not use this server; the operator can allow them with --allowed-origins"
    return ApiError(403, message, code="origin_not_allowed")


def foreign_host(name: str) -> ApiError:
    message = f"the server is not known as {name:.200}; the operator can name its hosts with --allowed-hosts"
    return ApiError(403, message, code="host_not_allowed")


def wrong_content_type(sent: str) -> ApiError:
    message = f"the body must be sent with the header Content-Type: application/json, not {sent:.100}"
    return ApiError(415, message, code="unsupported_content_type")


def encoded_body(sent: str) -> ApiError:
    message = f"the body must be sent as it is, without the header Content-Encoding: {sent:.100}"
    return ApiError(415, message, code="unsupported_content_encoding", headers={"accept-encoding": "identity"})


def too_slow(seconds: float) -> ApiError:
    return ApiError(408, f"the request body did not arrive within {seconds:g} seconds", code="request_timeout")


def aborted() -> ApiError:
    """Return the error of an aborted request, with a status after which clients do not retry."""
    return ApiError(499, "the request was aborted", type="server_error", code="request_aborted")


def no_answer(seconds: float) -> ApiError:
    return _unavailable(f"a worker of the server gave no answer within {seconds:g} seconds", "no_answer")


def unhealthy(seconds: float) -> ApiError:
    return _unavailable(f"the engine has given no sign of life for {seconds:.0f} seconds", "unhealthy")


def generation_error(cause: ErrorCause | None, field_names: Mapping[str, str]) -> ApiError:
    """Return the error of a sequence that failed in the engine."""
    if cause == "no_allowed_token":  # its grammar and its `allowed_token_ids` exclude each other
        field = "allowed_token_ids"
        message = f"{field} have no token that can follow the grammar of the answer at this point"
        return invalid_request(InvalidRequest(field, message), field_names)
    if cause == "grammar_too_large":
        field = "structured_outputs"
        message = (
            f"{field} gave a grammar that needs too much memory after the tokens so far: all grammars together have "
            f"reached the limit of {MAX_GRAMMARS_BYTES // 2**30} GiB, and this one needs more than an equal share of it"
        )
        return invalid_request(InvalidRequest(field, message), field_names)
    if cause == "grammar_unusable":
        field = "structured_outputs"
        message = f"{field} gave a grammar that cannot be followed with the tokenizer of this model"
        return invalid_request(InvalidRequest(field, message), field_names)
    if cause == "logits_not_finite":
        return ApiError(500, NOT_FINITE, type="server_error", code=cause, headers=NO_RETRY)
    return ApiError(500, "the generation failed in the server", type="server_error", code="generation_error")


def internal_error() -> ApiError:
    return ApiError(500, "internal server error", type="server_error", code="internal_error", headers=NO_RETRY)

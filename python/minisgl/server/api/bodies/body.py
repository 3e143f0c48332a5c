"""From the bytes of a request to a validated model of `schema`; whatever is wrong becomes an ApiError.

The JSON is read once, strictly: nested 200 deep at most, no NaN, no lone surrogates, no integers beyond 64 bits. An
explicit null counts as absent, at the top level, as OpenAI's clients send it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from collections.abc import Iterable, Set
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from minisgl.server.api.bodies.schema import Body
from minisgl.server.api.http.errors import ApiError, invalid, too_large, too_slow

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

MAX_LOGGED_FIELDS = 100
HAVE_CHECKS = frozenset({"prompt", "input_ids", "tokens"})  # of their own, and may be long


async def read_body(request: Request, max_bytes: int, timeout_seconds: float) -> bytes:
    """The whole body, unless it is too large (then no more of it is kept than the limit) or too slow."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _read_body(request, max_bytes)
    except TimeoutError:
        raise too_slow(timeout_seconds) from None


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > max_bytes:
        raise too_large(max_bytes)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise too_large(max_bytes)
    return bytes(data)


def read_fields(data: bytes) -> dict[str, Any]:
    """The fields of a JSON object, but for nulls; ApiError if it is none."""
    gc.disable()  # or it runs again and again over a large body's lists as they are made: three quarters of the time
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(None, f"the request body is not valid JSON: {error}") from None
    finally:
        gc.enable()
    if not isinstance(value, dict):
        raise invalid(None, "the request body must be a JSON object")
    return {name: field for name, field in value.items() if field is not None}


def validate(fields: dict[str, Any], model: type[B]) -> B:
    """The validated body, or ApiError naming the field."""
    check_numbers((name, field) for name, field in fields.items() if name not in HAVE_CHECKS)
    for name, neutral in model.not_supported.items():
        if name in fields and fields[name] not in neutral:
            raise invalid(name, f"{name} is not supported yet")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error) from None


def check_numbers(items: Iterable[tuple[str | int, Any]], path: str = "") -> None:
    """Refuse numbers that would not survive the way to the chat template: infinities and integers beyond 64 bits."""
    for key, value in items:
        if isinstance(value, str):
            continue
        if isinstance(value, dict):
            check_numbers(value.items(), f"{path}{key}.")
        elif isinstance(value, list):
            check_numbers(enumerate(value), f"{path}{key}.")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise invalid(f"{path}{key}", f"{path}{key}: the number is out of range")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise invalid(f"{path}{key}", f"{path}{key}: the integer does not fit 64 bits")


def _first_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Without the names of a union's types, which stand in it as well.
    param = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    return invalid(param, f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}")


class UnknownFields:
    """Names in the log, once, what clients send to no effect; so many names and no more."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: Set[str]) -> None:
        for name in sorted(names - self._logged)[: MAX_LOGGED_FIELDS - len(self._logged)]:
            self._logged.add(name)
            logger.warning("requests have the unknown field %.80r; it has no effect", name)

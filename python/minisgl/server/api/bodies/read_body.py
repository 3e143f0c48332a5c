"""Reads a request's body: from its bytes to a validated `Body`, or an ApiError.

The JSON is read once, strictly: nested 200 deep at most, no NaN, no lone surrogates, no integers beyond 64 bits. A null
at the top level counts as absent, because OpenAI's clients send it so.

Each function here runs in one turn of the event loop, in which all streams wait, or in several: the limits on bytes,
values and items are such that no turn takes 50 ms of a slow core (docs/reliability.md has the figures).
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from minisgl.limits import Limits
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.request_body import Body
from minisgl.server.api.http.errors import (
    ApiError,
    encoded_body,
    too_large,
    too_many_values,
    too_slow,
    wrong_content_type,
)

B = TypeVar("B", bound=Body)

MAX_VALUES = 65_536  # strings (names of fields included), objects and arrays
MAX_ITEMS = 262_144  # values separated by commas, most of which are token ids
# Memory of a value besides its text, and of a number in a list. Tools take ten times their bytes.
VALUE_BYTES, ITEM_BYTES = 100, 32
SCANNED_A_TURN = 2**20  # bytes whose values are counted in one turn of the event loop: 5 ms
HAVE_CHECKS = frozenset({"prompt", "input_ids", "tokens"})  # fields whose numbers are checked elsewhere
CONTAINERS = frozenset({dict, list})
_REFUSALS = {  # pydantic's types of errors whose own texts speak of Python
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "is not supported",
}
SHORT = 32  # items: shorter lists are checked together


class BodyScan:
    """Counts the JSON values of a body, so that one that would take long to parse is never parsed.

    Parsing JSON holds the GIL, in a thread too, and its cost depends on the number of objects, not of bytes: 4 MB of
    text take 5 ms, 4 MB of nested arrays half a second. Counting takes some 5 ns a byte. It is exact up to the first
    syntax error, where parsing ends.

    `values` counts strings, objects and arrays, `items` the commas between values. `_held` is a backslash whose escaped
    character comes with the next piece.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self.values = 0
        self.items = 0
        self._in_string = False
        self._held = b""

    def feed(self, piece: bytes | bytearray) -> None:
        """Count the values of the next piece; ApiError once there are more values or items than allowed."""
        data = self._held + piece
        num_backslashes = len(data) - len(data.rstrip(b"\\"))
        self._held = b"\\" * (num_backslashes % 2)
        data = data.removesuffix(self._held).replace(b"\\\\", b"").replace(b'\\"', b"")
        num_quotes = data.count(b'"')
        self.values += (num_quotes + self._in_string) // 2  # strings that end here
        self._check()  # before `split` makes a list of so many
        outside = b"".join(data.split(b'"')[self._in_string :: 2])
        self._in_string ^= num_quotes % 2 == 1
        self.values += outside.count(b"[") + outside.count(b"{")
        self.items += outside.count(b",")
        self._check()

    def _check(self) -> None:
        if self.values > MAX_VALUES:
            raise too_many_values(f"{MAX_VALUES} strings, objects and arrays")
        if self.items > self._max_items:
            raise too_many_values(f"{self._max_items} list items and fields")


async def read_body(request: Request, max_bytes: int, timeout_seconds: float) -> bytearray:
    """Return the whole body; ApiError if its type is not JSON, it comes too slowly, or has too many bytes."""
    check_content_type(request)
    check_content_encoding(request)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _read_body(request, max_bytes)
    except TimeoutError:
        raise too_slow(timeout_seconds) from None


def check_content_type(request: Request) -> None:
    """Raise ApiError if the Content-Type is given and is not JSON.

    Web pages may send text and forms to other sites without a CORS preflight, and this refuses them. A body without a
    type passes: browsers name the origin of such a request, which `gates` checks.
    """
    sent = request.headers.get("content-type", "")
    kind = sent.partition(";")[0].strip().lower()
    if kind and kind != "application/json":
        raise wrong_content_type(sent)


def check_content_encoding(request: Request) -> None:
    """Raise ApiError if the body is compressed: a few bytes could become more than any limit on bodies."""
    sent = request.headers.get("content-encoding", "").strip()
    if sent and sent.lower() != "identity":
        raise encoded_body(sent)


async def _read_body(request: Request, max_bytes: int) -> bytearray:
    declared = request.headers.get("content-length", "0").lstrip("0") or "0"  # the HTTP parser allows 20 other digits
    if not declared.isdecimal() or int(declared) > max_bytes:
        raise too_large(max_bytes)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise too_large(max_bytes)
    return data


async def size_of_objects(data: bytes | bytearray, max_items: int) -> int:
    """Return about how many bytes the objects of a JSON text take; ApiError if it has too many values or items."""
    scan = BodyScan(max_items)
    for start in range(0, len(data), SCANNED_A_TURN):
        if start:
            await asyncio.sleep(0)
        scan.feed(data[start : start + SCANNED_A_TURN])
    return scan.values * VALUE_BYTES + scan.items * ITEM_BYTES


def read_fields(data: bytes | bytearray) -> dict[str, Any]:
    """Return the fields of a JSON object that are not null; ApiError if the data is no JSON object."""
    # Otherwise the garbage collector scans a large body's lists again and again: three quarters of the time.
    gc.disable()
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="none")  # a cache doubles the time for many names
    except ValueError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from None
    finally:
        gc.enable()
    if not isinstance(value, dict):
        raise ApiError(400, "the request body must be a JSON object")
    return {name: field for name, field in value.items() if field is not None}


def validate(fields: dict[str, Any], model: type[B], limits: Limits) -> B:
    """Return the validated body; InvalidRequest naming the field that is wrong."""
    for name, neutral in model.not_supported.items():
        if name in fields and fields[name] not in neutral:
            raise InvalidRequest(name, f"{name} is not supported")
    try:
        body = model.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error) from None
    body.check_bounds(limits)
    return body


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Raise ApiError for numbers that the wire cannot carry: infinities and integers beyond 64 bits.

    The body is visited level by level. Whole lists are compared at a time, a level's short ones together, which takes a
    third of the time of visiting each value.
    """
    fields = {name: field for name, field in fields.items() if name not in HAVE_CHECKS}
    level: list[Sequence[Any]] = [list(fields.values())]
    while level:
        short = [items for items in level if len(items) < SHORT]
        nested: list[Any] = []
        for items in (list(chain.from_iterable(short)), *(items for items in level if len(items) >= SHORT)):
            kinds = set(map(type, items))
            if not (_integers_fit(items, kinds) and _floats_are_finite(items, kinds)):
                _refuse_number(fields, "")
            if not kinds.isdisjoint(CONTAINERS):
                nested += [item for item in items if type(item) in CONTAINERS]
        level = [item if isinstance(item, list) else list(item.values()) for item in nested]


def _integers_fit(items: Sequence[Any], kinds: Set[type]) -> bool:
    if int not in kinds:
        return True
    integers = items if len(kinds) == 1 else [item for item in items if type(item) is int]
    return min(integers) >= -(2**63) and max(integers) < 2**63


def _floats_are_finite(items: Sequence[Any], kinds: Set[type]) -> bool:
    return float not in kinds or not (math.inf in items or -math.inf in items)


def _refuse_number(value: Mapping[str, Any] | list[Any], path: str) -> None:
    """Raise ApiError naming the first number out of range below `value`, outer lists and objects first."""
    pairs = list(enumerate(value) if isinstance(value, list) else value.items())
    items = [item for _, item in pairs]
    kinds = set(map(type, items))
    if not _integers_fit(items, kinds):
        key = next(key for key, item in pairs if type(item) is int and not -(2**63) <= item < 2**63)
        text = f"{path}{key}: the integer does not fit 64 bits (-2^63 to 2^63 - 1)"
        raise ApiError(400, text, param=f"{path}{key}")
    if not _floats_are_finite(items, kinds):
        key = next(key for key, item in pairs if type(item) is float and math.isinf(item))
        raise ApiError(400, f"{path}{key}: the number is out of range", param=f"{path}{key}")
    for key, item in pairs if not kinds.isdisjoint(CONTAINERS) else ():
        if isinstance(item, (dict, list)):
            _refuse_number(item, f"{path}{key}.")


def _first_error(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # pydantic adds the names of a union's types, with brackets, to the location.
    param = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    if (text := _REFUSALS.get(first["type"])) is not None:
        return InvalidRequest(param, f"{param} {text}")
    return InvalidRequest(param, f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}")

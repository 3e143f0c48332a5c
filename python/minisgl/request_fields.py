"""One declaration per request field, from which its refusals and its entry in the OpenAPI document follow.

A request field is one of `SamplingParams` or of a request body (`server.api.bodies`) whose type is
`Annotated` with a `RequestField`. A body's field without a declaration of its own has that of the sampling parameter of
its name. This module knows none of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from minisgl.limits import Limits

Bound = float | str  # a number, or the name of one of `Limits`


@dataclass(frozen=True, eq=False)
class RequestField:
    """Sentence, example and bounds of a field; type and default stand where it is declared.

    `ge`, `gt` and `le` bound a number, `min_length` and `max_length` the characters of a text and the entries of a list
    or an object. `entries` declares each entry of a list, or key and value of an object's entries.
    """

    help: str
    example: Any = None
    ge: Bound | None = None
    gt: Bound | None = None
    le: Bound | None = None
    min_length: int | None = None
    max_length: Bound | None = None
    noun: str = "entries"  # plural of what `max_length` counts
    entries: tuple[RequestField, ...] = ()

    def refusal(self, name: str, value: Any, limits: Limits) -> str | None:
        """Return the sentence that refuses a value out of bounds, by name and limit; None for one that is allowed."""
        if value is None:
            return None
        if isinstance(value, int | float):
            return None if self._has_number(value, limits) else f"{name} must be {self._range(limits)}, not {value}"
        if isinstance(value, str):
            if self._has_length(value, limits):
                return None
            return f"{name} must have {self._lengths(limits)} characters, not {len(value)}"
        if not isinstance(value, list | tuple | dict):
            return None
        if not self._has_length(value, limits):
            return f"{name} must have {self._lengths(limits)} {self.noun}, not {len(value)}"
        if not self.entries or not value:
            return None
        columns: list[Any] = [value] if len(self.entries) == 1 else list(zip(*value, strict=True))
        refusals = (one._entry_refusal(name, column, limits) for one, column in zip(self.entries, columns, strict=True))
        return next((text for text in refusals if text is not None), None)

    def _entry_refusal(self, name: str, column: Sequence[Any], limits: Limits) -> str | None:
        if isinstance(column[0], str):
            wrong = next((text for text in column if not self._has_length(text, limits)), None)
            if wrong is None:
                return None
            return f"{name}: each must have {self._lengths(limits)} characters, not {len(wrong)}"
        low, high = _number(self.ge, -math.inf, limits), _number(self.le, math.inf, limits)
        wrong = next((value for value in column if not low <= value <= high), None)  # nan is not between them
        if wrong is None:
            return None
        if self is TOKEN_ID:
            return f"{name}: token id {wrong} is outside the vocabulary of {limits.vocab_size}"
        return f"{name}: each must be {self._range(limits)}, not {wrong}"

    def _has_number(self, value: float, limits: Limits) -> bool:
        return (  # nan is refused by any of them
            (self.ge is None or value >= _number(self.ge, 0, limits))
            and (self.gt is None or value > _number(self.gt, 0, limits))
            and (self.le is None or value <= _number(self.le, 0, limits))
        )

    def _has_length(self, value: Collection[Any], limits: Limits) -> bool:
        return (self.min_length or 0) <= len(value) <= _number(self.max_length, math.inf, limits)

    def _range(self, limits: Limits) -> str:
        if self.le is None:
            return f"at least {_number(self.ge, 0, limits)}"
        high = _number(self.le, 0, limits)
        if self.gt is not None:
            return f"above {_number(self.gt, 0, limits)} and at most {high}"
        return f"at most {high}" if self.ge is None else f"between {_number(self.ge, 0, limits)} and {high}"

    def _lengths(self, limits: Limits) -> str:
        if self.max_length is None:
            return f"at least {self.min_length}"
        high = _number(self.max_length, 0, limits)
        return f"at most {high}" if self.min_length is None else f"{self.min_length} to {high}"

    @property
    def bounded(self) -> bool:
        """False if every value of the field's type is allowed."""
        bounds = (self.ge, self.gt, self.le, self.min_length, self.max_length)
        return bool(self.entries) or any(bound is not None for bound in bounds)

    def schema(self, limits: Limits) -> dict[str, Any]:
        """Return the JSON Schema of the field without type and default; `limits` give the bounds that it names."""
        numbers = {"minimum": self.ge, "exclusiveMinimum": self.gt, "maximum": self.le}
        found: dict[str, Any] = {"description": self.help}
        found |= {key: _number(bound, 0, limits) for key, bound in numbers.items() if bound is not None}
        if self.example is not None:
            found["examples"] = [self.example]
        return found

    def length_schema(self, kind: str, limits: Limits) -> dict[str, Any]:
        """Return JSON Schema's bounds of the length of a "string", an "array" or an "object"."""
        suffix = {"string": "Length", "array": "Items", "object": "Properties"}[kind]
        bounds = {f"min{suffix}": self.min_length, f"max{suffix}": self.max_length}
        return {key: _number(bound, 0, limits) for key, bound in bounds.items() if bound is not None}


TOKEN_ID = RequestField("Id of the model's vocabulary.", ge=0, le="max_token_id")


def _number(bound: Bound | None, default: float, limits: Limits) -> float:
    if bound is None:
        return default
    number: float = getattr(limits, bound) if isinstance(bound, str) else bound
    return number


@cache
def request_fields(owner: type) -> dict[str, RequestField]:
    """Return the declarations of a class's fields by name, inherited ones included, in order."""
    found: dict[str, RequestField] = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        if get_origin(hint) is Annotated:
            found.update((name, extra) for extra in get_args(hint)[1:] if isinstance(extra, RequestField))
    return found


@cache
def bounded_fields(owner: type) -> dict[str, RequestField]:
    """Return those of `request_fields` that can be out of bounds; each request has them checked."""
    return {name: field for name, field in request_fields(owner).items() if field.bounded}

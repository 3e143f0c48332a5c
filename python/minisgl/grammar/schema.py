"""JSON schemas on their way to llguidance: bounds on what a client may send, and formats that it takes too loosely.

llguidance itself refuses the keywords that it cannot follow. Whatever it accepts must be followed to the letter, so
the formats of dates and times become patterns that know the lengths of months and have no leap seconds.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from minisgl.core import InvalidRequest

Json: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None

MAX_DEPTH = 64
MAX_DIVISOR = 10_000  # of multipleOf, with its point taken away: the automaton has a state for each remainder
DATA_KEYWORDS = frozenset(("const", "default", "enum", "examples", "required", "type"))  # hold no schemas
SCHEMA_MAPS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
EXACT_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def prepared_schema(text: str, field: str) -> dict[str, Any]:
    """The schema of a JSON text as llguidance is to see it; InvalidRequest if it is none or out of bounds."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise InvalidRequest(field, f"the schema is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidRequest(field, f"the schema is not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "a schema must be a JSON object")
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequest(field, f"the schema is nested deeper than {MAX_DEPTH} levels")
    prepared: dict[str, Any] = _prepare(schema, field)
    prepared.pop("x-guidance", None)  # would change what is refused
    return prepared


def _depth(value: Json) -> int:
    """Levels of objects and arrays, counted without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _prepare(schema: dict[str, Any], field: str) -> dict[str, Any]:
    prepared: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in DATA_KEYWORDS:
            prepared[keyword] = value
        elif keyword in SCHEMA_MAPS and isinstance(value, dict):
            prepared[keyword] = {name: _prepare_inner(one, field) for name, one in value.items()}
        else:
            prepared[keyword] = _prepare_inner(value, field)
    _check_divisor(schema.get("multipleOf"), field)
    pattern = EXACT_FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        del prepared["format"]
        others = prepared.get("allOf")
        prepared["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": pattern}]
    return prepared


def _prepare_inner(value: Json, field: str) -> Json:
    if isinstance(value, dict):
        return _prepare(value, field)
    if isinstance(value, list):
        return [_prepare_inner(one, field) for one in value]
    return value


def _check_divisor(divisor: Json, field: str) -> None:
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return  # llguidance says what is wrong with it
    digits = f"{divisor:.17g}".split("e")[0].replace(".", "").strip("-0")
    if len(digits) > len(str(MAX_DIVISOR)) or int(digits or "0") > MAX_DIVISOR:
        raise InvalidRequest(
            field, f"multipleOf {divisor} is not supported: without point and zeros at most {MAX_DIVISOR}"
        )

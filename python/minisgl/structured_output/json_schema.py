r"""Prepares JSON schemas for llguidance: checks bounds, and replaces keywords that llguidance follows too loosely.

llguidance itself refuses the keywords that it cannot follow, and what it accepts must be followed exactly. So formats
of dates and times become patterns with the right lengths of months and no leap seconds, and names of hosts get a
largest length. An exclusive bound at a whole number, which llguidance sometimes treats as inclusive, becomes an
inclusive bound a millionth away. llguidance reads numbers as doubles, the last digit of long ones inexactly, and
refuses large bounds. So the bound of an integer becomes one that a double holds, any other bound one of 15 digits,
within the schema's bounds and LARGEST_BOUND; `const` and `enum` may not have numbers that would change.

Where a pattern's class has all control characters and no quote or no backslash, as [^"] has, llguidance allows these
escaped. So classes lose the character 0, which no answer can have. Brackets, && and ~~ in a class are characters in
JSON Schema, and classes and operations on them in Rust's syntax; so they are escaped, and -- is refused.

Control characters can only be written as \u escapes, which are not allowed, because a key written with them would pass
for another key. A key that the schema does not name may be generated twice, which counts as once: so `minProperties`
may require at most one such key.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, NoReturn, TypeAlias, TypeGuard

from minisgl.sampling_params import InvalidRequest

Json: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None

MAX_DEPTH = 64
MAX_PATTERNS = 8  # patterns that one text must match
MAX_DIVISOR = 10_000  # digits of multipleOf without its decimal point: the automaton has a state for each remainder
MAX_INTEGER_CHARS = 20  # characters of an integer that may fit 64 bits: more are not parsed
DATA_KEYWORDS = frozenset(("const", "default", "enum", "examples", "required", "type"))  # their values are no schemas
SCHEMA_MAPS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
LARGEST_BOUND = 92 * 10**17  # below 2^63, where llguidance refuses to count
MAX_EXACT = 2**53  # doubles hold all integers up to this one
MAX_DIGITS = 15  # digits of a number that llguidance reads and writes as it is
MAX_HOSTNAME_CHARS = 253  # RFC 1123; llguidance limits the parts of the name only
MAX_EXPONENT = 22  # of a number's last digit: doubles hold larger powers of ten inexactly
NEAREST = "0.000001"  # distance from an exclusive bound to the inclusive one that replaces it
# Characters that JSON cannot write without \u, as themselves and, outside of classes, in regular expressions.
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_ESCAPED_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[0acv]|x[01]|x7[fF]|x\{|u00[01]|u007[fF]|u\{)")
# A class of more than one escape: llguidance takes a class of one for that character. Here and below a class without an
# end, which llguidance refuses, reaches to the pattern's, so that many of them are read once.
_CLASS = re.compile(r"(?<!\\)((?:\\\\)*)\[(?!\\(?:x..|u....|.)\])(?:[^\]\\]|\\.?)*+(?:\]|\Z)", re.DOTALL)
# A character class, whose first ] is a literal, or an escape outside of classes.
_PATTERN_PART = re.compile(
    r"\[(?P<negation>\^?)(?P<first>[]-]?)(?P<rest>(?:\[:\^?[a-z]+:\]|\\.?|[^\]\\])*+)(?P<end>\]|\Z)|\\.", re.DOTALL
)
# The character 0, other escapes and names of classes, and what begins another class or an operation on classes in Rust.
_CLASS_PART = re.compile(
    r"(?P<zero>\\(?:x00|u0000|0))|\\.|\[:\^?[a-z]+:\]|(?P<open>\[)|(?P<twice>[&~])(?=(?P=twice))|(?P<dashes>--)",
    re.DOTALL,
)

EXACT_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def prepared_schema(text: str, field: str, *, closes: bool) -> dict[str, Any]:
    """Return the schema of a JSON text, prepared for llguidance; InvalidRequest if it is invalid or out of bounds.

    `closes`: an object whose schema names keys, and does not mention others, may have no others.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_integer)
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
    if closes:
        parts = list(_subschemas(prepared))
        if not any(map(_joins_objects, parts)):
            for part in parts:
                _close_object(part)
    prepared.pop("x-guidance", None)  # a client's options for llguidance could lift its refusals
    return prepared


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:40]} is out of range")
    return number


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_CHARS or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(f"the integer {digits[:40]} does not fit 64 bits (-2^63 to 2^64 - 1)")
    return number


def _depth(value: Json) -> int:
    """Return the number of levels of objects and arrays, without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _prepare(schema: dict[str, Any], field: str) -> dict[str, Any]:
    prepared: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in DATA_KEYWORDS:
            if keyword in ("const", "enum", "required"):
                _check_characters(value, field)
                _check_numbers(value, field)
            prepared[keyword] = value
        elif keyword in SCHEMA_MAPS and isinstance(value, dict):
            is_pattern = keyword == "patternProperties"
            _check_characters(value, field, is_pattern=is_pattern)
            prepared[keyword] = {
                _in_rust(name, field) if is_pattern else name: _prepare_inner(one, field) for name, one in value.items()
            }
        else:
            prepared[keyword] = _prepare_inner(value, field)
    if isinstance(schema.get("pattern"), str):
        _check_characters(schema["pattern"], field, is_pattern=True)
        prepared["pattern"] = _in_rust(schema["pattern"], field)
    _check_divisor(schema.get("multipleOf"), field)
    _check_min_properties(schema, field)
    _narrow_bounds(prepared, is_integer=schema.get("type") == "integer")
    longest = schema.get("maxLength", MAX_HOSTNAME_CHARS)
    if schema.get("format") == "hostname" and _is_number(longest):  # llguidance refuses other values
        prepared["maxLength"] = min(longest, MAX_HOSTNAME_CHARS)
    pattern = EXACT_FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        del prepared["format"]
        others = prepared.get("allOf")
        prepared["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": pattern}]
    branches = prepared.get("allOf")
    if isinstance(branches, list) and sum("pattern" in one for one in branches if isinstance(one, dict)) > MAX_PATTERNS:
        raise InvalidRequest(field, f"allOf may have at most {MAX_PATTERNS} patterns")
    return prepared


def _prepare_inner(value: Json, field: str) -> Json:
    if isinstance(value, dict):
        return _prepare(value, field)
    if isinstance(value, list):
        return [_prepare_inner(one, field) for one in value]
    return value


def _subschemas(schema: Json) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _subschemas(one)
    elif isinstance(schema, dict):
        yield schema
        for keyword, value in schema.items():
            if keyword in SCHEMA_MAPS and isinstance(value, dict):
                yield from _subschemas(list(value.values()))
            elif keyword not in DATA_KEYWORDS:
                yield from _subschemas(value)


def _joins_objects(schema: dict[str, Any]) -> bool:
    """Return True if several schemas may name keys of the same object, so that none of them can be closed."""
    branches = schema.get("allOf")
    count = len(branches) if isinstance(branches, list) else 0
    return count > 1 or (bool(count or schema.keys() & {"$ref", "anyOf", "oneOf"}) and "properties" in schema)


def _close_object(schema: dict[str, Any]) -> None:
    names, required = schema.get("properties"), schema.get("required")
    if not isinstance(names, dict) or not names or schema.keys() & {"additionalProperties", "unevaluatedProperties"}:
        return
    if isinstance(required, list) and not all(isinstance(name, str) and name in names for name in required):
        return
    schema["additionalProperties"] = False


def _narrow_bounds(schema: dict[str, Any], *, is_integer: bool) -> None:
    """Replace the bounds of numbers that llguidance would widen or refuse by bounds just inside them."""
    for exclusive, inclusive, choose, inward in (
        ("exclusiveMinimum", "minimum", max, math.inf),
        ("exclusiveMaximum", "maximum", min, -math.inf),
    ):
        bound, open_bound = schema.get(inclusive), schema.get(exclusive)
        if _is_number(bound):
            schema[inclusive] = bound = _bound_inside(bound, inward, is_integer=is_integer)
        if not _is_number(open_bound):
            continue
        is_open = is_integer or open_bound == int(open_bound)
        nearest = _bound_inside(open_bound, inward, is_integer=is_integer, is_open=is_open)
        if is_open:
            del schema[exclusive]
            schema[inclusive] = choose(bound, nearest) if _is_number(bound) else nearest
        else:
            schema[exclusive] = nearest


def _bound_inside(bound: float, inward: float, *, is_integer: bool, is_open: bool = False) -> float:
    """Return the first bound that llguidance reads exactly, in the direction of `inward`; `is_open`: another one."""
    nearest = (_integer_bound if is_integer else _number_bound)(bound, inward, is_open)
    return max(nearest, -LARGEST_BOUND) if inward > 0 else min(nearest, LARGEST_BOUND)


def _is_number(value: Json) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer_bound(bound: float, inward: float, is_open: bool) -> float:
    """Return the first integer within a bound that a double holds, as a float if it may not fit 64 bits."""
    integer = math.ceil(bound) if inward > 0 else math.floor(bound)
    if is_open and integer == bound:
        integer += 1 if inward > 0 else -1
    double = float(integer)
    is_outside = double < integer if inward > 0 else double > integer
    if is_outside:
        double = math.nextafter(double, inward)
    return double if abs(double) > 2**63 else int(double)


def _number_bound(bound: float, inward: float, is_open: bool) -> float:
    """Return the first number within a bound that has few digits; of an open bound, one that is NEAREST inside it."""
    exact = nearest = Decimal(repr(bound))
    if is_open:
        nearest += Decimal(NEAREST).copy_sign(Decimal(inward))
    elif isinstance(bound, int) and abs(bound) <= MAX_EXACT:  # 16 digits, which llguidance reads as they are
        return bound
    rounding = ROUND_CEILING if inward > 0 else ROUND_FLOOR
    nearest = Context(MAX_DIGITS, rounding).plus(nearest)
    if nearest.adjusted() < MAX_DIGITS - MAX_EXPONENT:
        nearest = nearest.quantize(Decimal(10) ** -MAX_EXPONENT, rounding)
    return bound if nearest == exact else float(nearest)


def _is_read_exactly(number: float) -> bool:
    """Return True if llguidance reads a number's digits as this number.

    Its JSON parser (serde_json) rounds the digits, an integer, to a double, and then the product or quotient of that
    and a power of ten. For most numbers of 16 and 17 digits the result is the nearest double, as it should be.
    """
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    integer, shift = float("".join(map(str, digits))), int(exponent)
    if abs(shift) > sys.float_info.max_10_exp:
        return False
    power = float(f"1e{abs(shift)}")
    return abs(number) == (integer * power if shift > 0 else integer / power)


def _in_rust(pattern: str, field: str) -> str:
    """Return a pattern with JSON Schema's (ECMA-262's) meaning of character classes, but without the character 0."""

    def class_part(found: re.Match[str]) -> str:
        if found["zero"]:
            return r"\x01"
        if found["dashes"]:
            raise InvalidRequest(field, f"-- in a class is not supported, write -\\-: {pattern[:80]!r}")
        literal = found["open"] or found["twice"]
        return f"\\{literal}" if literal else found[0]

    def part(found: re.Match[str]) -> str:
        if found[0].startswith("\\"):
            return found[0]
        begin = r"[^\x00" if found["negation"] else "["
        first = f"\\{found['first']}" if found["first"] else ""
        return f"{begin}{first}{_CLASS_PART.sub(class_part, found['rest'])}{found['end']}"

    return _PATTERN_PART.sub(part, pattern)


def _check_characters(value: Json, field: str, *, is_pattern: bool = False) -> None:
    """Raise InvalidRequest for control characters, which an answer cannot have."""
    for text in _scalars(value):
        if not isinstance(text, str):
            continue
        found = _CONTROL.search(text) or (_ESCAPED_CONTROL.search(_CLASS.sub(r"\1", text)) if is_pattern else None)
        if found is not None:
            raise InvalidRequest(field, f"control characters are not supported: {text[:80]!r}")


def _check_numbers(value: Json, field: str) -> None:
    """Raise InvalidRequest for numbers of an answer that llguidance would round."""
    for number in _scalars(value):
        if isinstance(number, int) and float(number) != number:
            raise InvalidRequest(field, f"the integer {number} is not supported: no double holds it (use a string)")
        if isinstance(number, float) and not _is_read_exactly(number):
            rounded = f"its last digit would change; with at most {MAX_DIGITS} digits it does not (or use a string)"
            raise InvalidRequest(field, f"the number {number} is not supported: {rounded}")


def _scalars(value: Json) -> Iterator[str | int | float | bool | None]:
    """Yield the keys, texts, numbers and constants of a value."""
    if isinstance(value, dict | list):
        yield from value if isinstance(value, dict) else ()
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _scalars(inner)
    else:
        yield value


def _check_min_properties(schema: dict[str, Any], field: str) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    most = 1 + (len(required) if isinstance(required, list) else 0)
    if isinstance(least, int) and least > most:
        raise InvalidRequest(field, f"minProperties {least} is not supported: at most 1 more than what is required")


def _check_divisor(divisor: Json, field: str) -> None:
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return  # llguidance says what is wrong with it
    digits = repr(divisor).split("e")[0].replace(".", "").strip("-0")
    if len(digits) > len(str(MAX_DIVISOR)) or int(digits or "0") > MAX_DIVISOR:
        raise InvalidRequest(
            field, f"multipleOf {divisor} is not supported: without point and zeros at most {MAX_DIVISOR}"
        )

"""Reads values in plain text: strings without quotation marks, everything else as JSON.

The schema determines the meaning of a text. `typed` returns the JSON for a text (for the parser); `texts_of` and
`is_exact` say which texts a schema allows (for the grammars of `structured_output.tool_grammar`).

Schemas come from clients: their references may branch at every level and form cycles. Each function visits each part of
a schema once, without recursion, and takes the parts from an `Allowance`.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.sampling_params import InvalidRequest

Schema = Mapping[str, Any]

MAX_ALTERNATIVES = 20_000  # parts of schemas and named values; visiting them takes some 10 ms
SAYS_NOTHING = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema"))
ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_LITERAL_CHARS = 20_000  # characters of Python's notation, which takes far longer to read than JSON
_CHARS_A_PART = 16  # characters of a value's text that cost as much as a part of a schema
_INTEGER = re.compile(r"[+-]?\d{1,300}")
_FEW_VALUES: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}  # by type
_MODEL_TEXT = "<text of a model>"  # in place of a file's name
_OPTIONS = ("anyOf", "oneOf")
_NAMED = frozenset(("const", "enum"))

# Python writes a line to stderr for each text like 'C:\data', whose backslash escapes nothing.
warnings.filterwarnings("ignore", module=re.escape(_MODEL_TEXT))


@dataclass(slots=True)
class Allowance:
    """Bounds how many parts of a client's schemas are visited."""

    left: int = MAX_ALTERNATIVES

    def spend(self, parts: int) -> None:
        """Use up `parts` of the allowance; InvalidRequest if they are not left."""
        self.left -= parts
        if self.left < 0:
            text = f"tools have parameters with too many alternatives: at most {MAX_ALTERNATIVES} are supported"
            raise InvalidRequest("tools", text)


def types_of(schema: Any, root: Schema, allowance: Allowance) -> frozenset[str]:
    """Return the JSON types that a schema allows; string if it does not say. InvalidRequest beyond the allowance."""
    found = _alternatives(schema, root, _NAMED | {"type"}, allowance)
    return frozenset().union(*(_types_of_one(one, allowance) for one in found.schemas))


def texts_of(schema: Any, root: Schema, allowance: Allowance) -> list[str] | None:
    """Return all texts that a schema allows, if they are few. InvalidRequest beyond the allowance."""
    values = _values(schema, root, allowance)
    return None if values is None else [_text_of(value, allowance) for value in values]


def is_exact(schema: Any, root: Schema, allowance: Allowance) -> bool:
    """Return True if every value whose text is one of `texts_of` (any text if that is None) follows the schema.

    InvalidRequest beyond the allowance.
    """
    types = types_of(schema, root, allowance)
    if "string" not in types:
        return True
    values = _values(schema, root, allowance)
    if values is None:
        return _allows_any_text(schema, root, allowance)
    return all(json.loads(typed(_text_of(value, allowance), types)) == value for value in values)


def typed(text: str, types: frozenset[str]) -> str:
    """Return a value's text as JSON: of one of these types if possible, else a string."""
    word = text.strip()
    if "null" in types and word.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    if types & {"integer", "number"} and _INTEGER.fullmatch(word):
        return str(int(word))
    if "number" in types:
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return json.dumps(number)
    if types & {"object", "array"}:
        for read in (json.loads, _literal) if len(word) <= _MAX_LITERAL_CHARS else (json.loads,):
            try:
                value = read(word)
                if ("object" in types and isinstance(value, dict)) or ("array" in types and isinstance(value, list)):
                    return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return json.dumps(text, ensure_ascii=False)


def python_expression(text: str) -> ast.expr:
    """Return the syntax tree of an expression that a model wrote in Python's notation. Raises what `ast.parse` does."""
    return ast.parse(text, _MODEL_TEXT, mode="eval").body


def _literal(text: str) -> object:
    return ast.literal_eval(python_expression(text))


@dataclass(frozen=True, slots=True)
class _Alternatives:
    """Schemas, one of which a value must follow. `only`: there are no other conditions."""

    schemas: list[Any]
    only: bool


def _alternatives(schema: Any, root: Schema, ends: frozenset[str], allowance: Allowance) -> _Alternatives:
    """Return the schemas at the end of references and options, in the forms that pydantic writes.

    A schema with one of the keywords `ends` is not followed further. Each schema is visited once, however many
    references lead to it. If they lead only in a cycle, the result is the first schema.
    """
    found: list[Any] = []
    only = True
    met: set[int] = set()
    stack = [schema]
    while stack:
        one = stack.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        allowance.spend(1)
        options = None if not isinstance(one, Mapping) or ends & one.keys() else _options(one)
        if options is not None:
            only = only and len(_keywords(one)) == 1
            allowance.spend(len(options))
            stack += reversed(options)
        elif (target := _target(one, root)) is not one:
            stack.append(target)
        else:
            found.append(one)
    return _Alternatives(found, only) if found else _Alternatives([schema], False)


def _target(schema: Any, root: Schema) -> Any:
    """Return the schema that this one refers to, if it is only a reference to a definition; else itself."""
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and not _keywords(schema) - {"allOf"}:
        return parts[0]
    if isinstance(reference := schema.get("$ref"), str) and not _keywords(schema) - {"$ref"}:
        head, _, name = reference.removeprefix("#/").partition("/")
        definitions = root.get(head)
        if isinstance(definitions, Mapping) and name in definitions:
            return definitions[name]
    return schema


def _types_of_one(schema: Any, allowance: Allowance) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if (values := _named_values(schema)) is not None:
        allowance.spend(len(values))
        return frozenset(map(_type_of, values))
    return frozenset({"object", "string"} if "$ref" in schema or "allOf" in schema else {"string"})


def _allows_any_text(schema: Any, root: Schema, allowance: Allowance) -> bool:
    """Return True if the schema allows every value that a text can mean."""
    found = _alternatives(schema, root, frozenset(), allowance)
    texts = [_is_any_text(one, allowance) for one in found.schemas]
    others = [one for one, is_text in zip(found.schemas, texts, strict=True) if not is_text]
    return found.only and any(texts) and all(map(_is_bare, others))


def _is_any_text(schema: Any, allowance: Allowance) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    return not _keywords(schema) or ("string" in _types_of_one(schema, allowance) and _is_bare(schema))


def _is_bare(schema: Any) -> bool:
    """Return True if the schema has no condition but a type, which is a simple one."""
    simple = ("string", "integer", "number", "boolean", "null")
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    named = kinds if isinstance(kinds, list) else [kinds]
    return isinstance(schema, Mapping) and _keywords(schema) == {"type"} and all(kind in simple for kind in named)


def _keywords(schema: Schema) -> set[str]:
    return set(schema) - SAYS_NOTHING


def _values(schema: Any, root: Schema, allowance: Allowance) -> list[Any] | None:
    """Return all values that a schema allows, if it lists them."""
    values: list[Any] = []
    for one in _alternatives(schema, root, _NAMED, allowance).schemas:
        if not isinstance(one, Mapping):
            return None
        named = _named_values(one)
        few = _FEW_VALUES.get(str(one.get("type"))) if named is None else named
        if few is None:
            return None
        allowance.spend(len(few))
        values += few
    return values


def _named_values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _text_of(value: Any, allowance: Allowance) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    allowance.spend(len(text) // _CHARS_A_PART)
    return text


def _options(schema: Schema) -> list[Any] | None:
    """Return the options of a schema (anyOf, oneOf), if it has any."""
    return next((options for key in _OPTIONS if isinstance(options := schema.get(key), list)), None)


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "null" if value is None else "string"

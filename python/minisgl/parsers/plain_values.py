"""Values that are written as plain text: strings without quotation marks, everything else as JSON.

The schema says what a text means. Here is what it means, which texts a schema allows, and whether that is exact.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

SAYS_NOTHING = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema"))
_INTEGER = re.compile(r"[+-]?\d{1,300}")
_FEW_VALUES: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}  # by type
_OPTIONS = ("anyOf", "oneOf")


def resolved(schema: Any, root: Schema) -> Any:
    """The schema that this one refers to, as pydantic writes it; itself, if it refers to none at the root."""
    for _ in range(len(root) + 1):  # references may go round in a circle
        if not isinstance(schema, Mapping):
            return schema
        if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and not _keywords(schema) - {"allOf"}:
            schema = parts[0]
        elif isinstance(reference := schema.get("$ref"), str) and not _keywords(schema) - {"$ref"}:
            head, _, name = reference.removeprefix("#/").partition("/")
            definitions = root.get(head)
            if not isinstance(definitions, Mapping) or name not in definitions:
                return schema
            schema = definitions[name]
        else:
            return schema
    return schema


def types_of(schema: Any, root: Schema) -> set[str]:
    """The JSON types that a schema allows; string where it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return {"string"}
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    if (values := _named_values(schema)) is not None:
        return {_type_of(value) for value in values}
    for options in _options(schema):
        return {kind for one in options for kind in types_of(one, root)}
    return {"object", "string"} if "$ref" in schema or "allOf" in schema else {"string"}


def texts_of(schema: Any, root: Schema) -> list[str] | None:
    """All texts that a schema allows, if they are few."""
    values = _values(schema, root)
    return None if values is None else [_text_of(value) for value in values]


def is_exact(schema: Any, root: Schema) -> bool:
    """Whether a value follows the schema if its text is one of `texts_of`, or any where that has none."""
    types = types_of(schema, root)
    if "string" not in types:
        return True
    values = _values(schema, root)
    if values is None:
        return _allows_any_text(schema, root)
    return all(json.loads(typed(_text_of(value), types)) == value for value in values)


def typed(text: str, types: set[str]) -> str:
    """The JSON text of a value; a string if it is of none of these types."""
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
        for read in (json.loads, ast.literal_eval):
            try:
                value = read(word)
                if ("object" in types and isinstance(value, dict)) or ("array" in types and isinstance(value, list)):
                    return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return json.dumps(text, ensure_ascii=False)


def _allows_any_text(schema: Any, root: Schema) -> bool:
    """Whether all that a text may stand for is allowed."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return schema is True
    if not _keywords(schema):
        return True
    for options in _options(schema):
        texts = [_allows_any_text(one, root) for one in options]
        others = [one for one, is_text in zip(options, texts, strict=True) if not is_text]
        return any(texts) and all(_is_bare(resolved(one, root)) for one in others) and len(_keywords(schema)) == 1
    return "string" in types_of(schema, root) and _is_bare(schema)


def _is_bare(schema: Any) -> bool:
    """Whether it says nothing of a value but its type, which is a simple one."""
    simple = ("string", "integer", "number", "boolean", "null")
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    named = kinds if isinstance(kinds, list) else [kinds]
    return isinstance(schema, Mapping) and _keywords(schema) == {"type"} and all(kind in simple for kind in named)


def _keywords(schema: Schema) -> set[str]:
    return set(schema) - SAYS_NOTHING


def _values(schema: Any, root: Schema) -> list[Any] | None:
    """All values that a schema allows, if it names them."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return None
    if (named := _named_values(schema)) is not None:
        return named
    for options in _options(schema):
        found = [_values(one, root) for one in options]
        return None if None in found else [value for values in found for value in values or ()]
    return _FEW_VALUES.get(str(schema.get("type")))


def _named_values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _options(schema: Schema) -> Iterator[list[Any]]:
    """The options of a schema that has some."""
    for key in _OPTIONS:
        if isinstance(options := schema.get(key), list):
            yield options


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "null" if value is None else "string"

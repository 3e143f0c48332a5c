"""Schemas of our own, made systematically: every keyword alone, in company, and nested."""

from __future__ import annotations

from itertools import combinations
from typing import Any

Schema = dict[str, Any]

STRINGS: dict[str, Schema] = {
    "any string": {"type": "string"},
    "short": {"type": "string", "maxLength": 6},
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "at least": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
    "pattern inside": {"type": "string", "pattern": "ab", "maxLength": 10},
    "pattern of digits": {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    "alternatives": {"type": "string", "pattern": "^(red|green|blue)( (light|dark))?$"},
    "escapes": {"type": "string", "pattern": r'^["\\/]+$', "maxLength": 5},
    "unicode": {"type": "string", "pattern": "^[äöü☃]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "duration": {"type": "string", "format": "duration"},
}
NUMBERS: dict[str, Schema] = {
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "natural": {"type": "integer", "minimum": 0},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "negative": {"type": "integer", "exclusiveMaximum": 0},
    "odd range": {"type": "integer", "exclusiveMinimum": -17, "exclusiveMaximum": 1234},
    "fraction": {"type": "number", "minimum": 0, "maximum": 1},
    "open fraction": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "temperature": {"type": "number", "minimum": -273.15},
    "multiple": {"type": "integer", "multipleOf": 7},
    "multiple in a range": {"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 1000},
    "quarters": {"type": "number", "multipleOf": 0.25},
}
OTHERS: dict[str, Schema] = {
    "anything": {},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["integer", "boolean", "null"]},
    "enum": {"enum": ["a", "bc", 1, 2.5, None, True, {"x": [1]}, 'quo"te', "new\nline"]},
    "const": {"const": {"kind": "fixed", "list": [1, "two", None]}},
    "optional string": {"type": ["string", "null"], "maxLength": 5},
}
SCALARS = STRINGS | NUMBERS | OTHERS
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
STRANGE_KEYS = ['q"uote', "sl/ash", "ba\\ck", "ä☃", "", "\t"]
TREE: Schema = {
    "type": "object",
    "properties": {
        "value": DIGIT,
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["value", "children"],
    "additionalProperties": False,
}
LINKED: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, "id": {"type": "integer"}},
            "required": ["id", "next"],
            "additionalProperties": False,
        }
    },
}
SHAPES: Schema = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}},
            "required": ["kind", "radius"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1}},
            "required": ["kind", "side"],
            "additionalProperties": False,
        },
    ]
}
WHOLES: dict[str, Schema] = {
    "tree": TREE,
    "linked list": LINKED,
    "shapes": SHAPES,
    "list of shapes": {"type": "array", "items": SHAPES, "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 4}],
        "items": {"type": "boolean"},
        "minItems": 2,
        "maxItems": 4,
    },
    "closed tuple": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 2},
    "exact count": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
    "matrix": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "minItems": 2,
        "maxItems": 2,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "map with one": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    "map with at most one": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    "keys by pattern": {
        "type": "object",
        "patternProperties": {
            "^n_[a-z]{1,3}$": {"type": "integer"},
            "^s_[a-z]{1,3}$": {"type": "string", "maxLength": 3},
        },
        "additionalProperties": False,
    },
    "keys and the rest": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}},
        "required": ["name"],
        "additionalProperties": {"type": "integer"},
    },
    "required but not described": {
        "type": "object",
        "required": ["a", "b"],
        "additionalProperties": {"type": "integer"},
    },
    "all of two": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "string", "maxLength": 3}}, "required": ["b"]},
        ]
    },
    "any of two objects": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": False},
        ]
    },
    "either required": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "additionalProperties": False,
    },
    "any of with company": {"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 100, "maximum": 120}]},
    "strange keys": {
        "type": "object",
        "properties": dict.fromkeys(STRANGE_KEYS, DIGIT),
        "required": STRANGE_KEYS,
        "additionalProperties": False,
    },
}


def _record(names: tuple[str, ...], required: int, *, is_open: bool) -> Schema:
    keys = [f"key_{index}" for index in range(len(names))]
    return {
        "type": "object",
        "properties": {key: SCALARS[name] for key, name in zip(keys, names, strict=True)},
        "required": keys[:required],
        **({} if is_open else {"additionalProperties": False}),
    }


def own_schemas() -> dict[str, Schema]:
    """Return schemas by name; always the same ones."""
    schemas = {**SCALARS, **WHOLES}
    for name, schema in SCALARS.items():
        schemas[f"array of {name}"] = {"type": "array", "items": schema, "maxItems": 3}
        schemas[f"object with {name}"] = _record((name,), 1, is_open=False)
        schemas[f"referred {name}"] = {
            "type": "object",
            "properties": {"it": {"$ref": "#/$defs/it"}},
            "required": ["it"],
            "additionalProperties": False,
            "$defs": {"it": schema},
        }
    names = list(SCALARS)
    for index, pair in enumerate(list(combinations(names, 2))[::9]):
        schemas[f"record {index} of {' and '.join(pair)}"] = _record(pair, index % 3, is_open=index % 5 == 0)
    return schemas

"""Writes the tables of fields in docs/api.md from their declarations, between its markers.

    python tools/api_tables.py

A marker names the body: `<!-- fields ChatBody -->`, up to `<!-- end -->`. RequestBody's table has the fields of all
routes that generate, those of the others what they add or change.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from minisgl.limits import Limits
from minisgl.request_fields import TOKEN_ID, Bound, RequestField
from minisgl.server.api.anthropic import bodies as anthropic
from minisgl.server.api.bodies import route_bodies
from minisgl.server.api.bodies.request_body import Body, RequestBody
from minisgl.server.api.openapi import body_components, declaration_of
from minisgl.server.api.pooling import bodies as pooling
from minisgl.server.api.responses.body import ResponsesBody

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MARKED = re.compile(r"(<!-- fields (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
BODIES = {**vars(route_bodies), **vars(anthropic), **vars(pooling), "ResponsesBody": ResponsesBody}
LIMITS = Limits(max_seq_len=1, vocab_size=1)  # limits that only a model has are named
LIMIT_WORDS = {
    "max_seq_len": "the context length",
    "vocab_size": "all",
    "max_choices": f"{LIMITS.max_choices} (`--max-choices`)",
    "max_stop_strings": f"{LIMITS.max_stop_strings} (`--max-stop-strings`)",
    "max_logprobs": f"{LIMITS.max_logprobs} (`--max-logprobs`)",
}


def write_tables(page: str) -> str:
    """Return the page with each marked table made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{field_table(BODIES[found[2]])}\n{found[3]}", page)


def field_table(body: type[Body]) -> str:
    """Return the table of a body's own fields."""
    properties = body_components([body], {}, LIMITS)[body.__name__]["properties"]
    own = [
        name
        for name in properties
        if body is RequestBody or name not in RequestBody.model_fields or _differs(body, name)
    ]
    rows = [_row(name, properties[name], declaration_of(body, name)) for name in own]
    return "\n".join(["| field | type, bounds | default | meaning |", "|---|---|---|---|", *rows])


def _differs(body: type[Body], name: str) -> bool:
    """True if the body declares a field otherwise than RequestBody; declarations are compared by what they say."""
    return repr(declaration_of(body, name)) != repr(declaration_of(RequestBody, name)) or (
        body.model_fields[name].default != RequestBody.model_fields[name].default
    )


def _row(name: str, schema: dict[str, Any], field: RequestField) -> str:
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    allowed = ", ".join(filter(None, (" or ".join(map(_kind, kinds)), _bounds(field, kinds[-1].get("type", "")))))
    default = f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
    return f"| `{name}` | {allowed} | {default} | {field.help.replace('|', '&#124;')} |"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] != "array":
        return str(schema["type"])
    item = schema["items"]
    if "anyOf" in item:
        return f"list of {' or '.join(f'{_kind(kind)}s' for kind in item['anyOf'])}"
    return f"list of {_kind(item)}s" if "type" in item and item["type"] != "array" else "list of lists of integers"


def _bounds(field: RequestField, kind: str) -> str:
    parts = [_between(field.ge, field.le) if field.gt is None else f"above {_word(field.gt)} to {_word(field.le)}"]
    lengths = _between(field.min_length, field.max_length)
    if lengths:
        noun = "characters" if kind == "string" else field.noun
        parts.append(f"{lengths} {noun}")
    for entry in field.entries:
        if entry is TOKEN_ID:
            parts.append("ids of the vocabulary")
        elif entry.max_length is not None:
            parts.append(f"each {_between(entry.min_length, entry.max_length)} characters")
        elif entry.ge is not None:
            parts.append(f"each {_between(entry.ge, entry.le)}")
    return ", ".join(filter(None, parts))


def _between(low: Bound | None, high: Bound | None) -> str:
    if low is None:
        return "" if high is None else f"up to {_word(high)}"
    return f"{_word(low)} and up" if high is None else f"{_word(low)} to {_word(high)}"


def _word(bound: Bound | None) -> str:
    if isinstance(bound, str):
        return LIMIT_WORDS[bound]
    exact = {2**31 - 1: "2^31 - 1", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
    return exact.get(int(bound or 0), f"{bound:g}") if bound is not None else ""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(write_tables(PAGE.read_text()))

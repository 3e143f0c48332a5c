"""Sketches: grammars of the server's own in which tokens, and what other grammars allow, are not filled in yet.

`parsers.constraint` writes them, and says what their notation is. They are completed where grammars are tried, because
a client's grammar that stands in one takes time to translate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from minisgl.core import Grammar
from minisgl.grammar.text import lark_rule

_OPEN = re.compile(
    r"""
    ^%grammar\ (?P<rule>\w+)\ (?P<grammar>\[.*\])$
    | ^%until\ (?P<until>\w+)\ (?P<end>"(?:[^"\\]|\\.)*")$
    | %marker\ (?P<marker>"(?:[^"\\]|\\.)*")
    """,
    re.MULTILINE | re.VERBOSE,
)


def completed(sketch: Grammar, tokens: Mapping[str, int]) -> Grammar:
    """The Lark that a sketch stands for, which may hold others. `tokens` are those that it may name, by their text.

    InvalidRequest if a grammar in it is out of bounds or plainly wrong.
    """

    def replaced(found: re.Match[str]) -> str:
        # What is put in is not searched: it may be a client's, and say anything.
        if found["rule"]:
            inner = Grammar(*json.loads(found["grammar"]))
            return lark_rule(found["rule"], completed(inner, tokens) if inner.kind == "sketch" else inner)
        if found["until"]:
            return _until(found["until"], json.loads(found["end"]), tokens)
        return _token(json.loads(found["marker"]), tokens)

    return Grammar("lark", _OPEN.sub(replaced, sketch.text))


def _token(marker: str, tokens: Mapping[str, int]) -> str:
    index = tokens.get(marker)
    return _text(marker) if index is None else f"<[{index}]>"


def _until(name: str, marker: str, tokens: Mapping[str, int]) -> str:
    if marker in tokens:
        return f"{name}: TEXT {_token(marker, tokens)}"
    return f"{name}[suffix={_text(marker)}]: TEXT"


def _text(marker: str) -> str:
    return json.dumps(marker, ensure_ascii=False)

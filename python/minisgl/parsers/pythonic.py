"""Tool calls of Llama 3.2 and 4 in Python's syntax: `[name(key=value, ...), ...]`, with literals as values.

A call is held back until its closing parenthesis, because only then it is certain to be a call. One that would take
long to read is content. Names of tools and arguments need not be names in Python: `[get-page(from=1)]` is a call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection

from minisgl.parsers.json_call import ValueEnd
from minisgl.parsers.plain_values import python_expression
from minisgl.parsers.streaming import end_of, next_character
from minisgl.parsers.tool_calls import MAX_NAME, ToolCallParser, Tools

MAX_CODE_CHARS = 20_000  # characters of a call outside of its strings, which Python reads in some 50 ms
_NAME = re.compile(r"[\w.:/-]*")
_BETWEEN = re.compile(r"[^\"'()\[\]{}]*")  # characters outside of strings that do not nest
# Parts of a list of arguments: a string, or characters that neither nest nor separate, or one that does.
_PART = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\"'()\[\]{},]+|.", re.DOTALL)
_FORMATTED = re.compile(r"[fFtT][rR]?\Z")  # what comes before a string that has code in it and is no literal
_BLANK = re.compile(r"(?:\s|#[^\n]*\n)*")  # white space and comments
_NOT_IN_KEYS = re.compile(r"[\"'()\[\]{},=*#]")
_CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in


class PythonicParser(ToolCallParser):
    """Reads a list of calls that is the whole answer, or comes after `<|python_start|>`."""

    markers = ("<|python_start|>",)
    kept = ("<|python_start|>", "<|python_end|>")
    shown_by = ("[func_name1(",)

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        super().__init__(tools, new_id)
        self._call = _Call(tools)
        self._state = type(self)._at_list

    def _begin(self) -> None:
        self._state = type(self)._at_list

    def _at_list(self) -> bool:
        character, at = next_character(self._buffer)
        if character == "[":
            self._begin_call(at + 1)
        elif character and self._head:
            self._reject()
        elif character:
            self._state = type(self)._content
        return bool(character)

    def _begin_call(self, end: int) -> None:
        self._take_head(end)
        self._call = _Call(self._tools)
        self._state = type(self)._in_call

    def _in_call(self) -> bool:
        call = self._call
        taken = call.feed(self._buffer)
        if taken:
            self._raw.append(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        if call.failed:
            self._reject()
        elif call.done:
            self._start(call.name)
            self._add(call.arguments)
            self._end(type(self)._after_item)
        else:
            return False
        return True

    def _after_item(self) -> bool:
        character, at = next_character(self._buffer)
        if character == ",":
            self._begin_call(at + 1)
        elif character == "]":
            self._buffer = self._buffer[at + 1 :]
            self._state = type(self)._closing
        elif character:
            self._state = type(self)._content
        return bool(character)

    def _closing(self) -> bool:
        return self._expect("<|python_end|>", type(self)._content)


class _Call:
    """Reads one call, `name(key=value, ...)`, piece by piece."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._head = ""  # name so far
        self._text: list[str] = []  # arguments in their parentheses
        self._parentheses = ValueEnd("(", _BETWEEN)
        self.name = ""
        self.arguments = ""  # JSON, once the call is done
        self.done = False
        self.failed = False

    def feed(self, text: str) -> int:
        """Add text; return how much of it belongs to the call."""
        at = 0 if self.name else self._read_name(text)
        if self.name and at < len(text):
            begin, at = at, self._parentheses.feed(text, at)
            self._text.append(text[begin:at])
            if self._parentheses.code_chars > MAX_CODE_CHARS:
                self.failed = True
            elif self._parentheses.ended:
                self._finish()
        return at

    def _read_name(self, text: str) -> int:
        begin = 0 if self._head else len(text) - len(text.lstrip())
        end = min(end_of(_NAME, text, begin), begin + MAX_NAME - len(self._head))
        self._head += text[begin:end]
        if end < len(text):
            if text[end] == "(" and self._head in self._names:
                self.name = self._head
            else:
                self.failed = True
        return end

    def _finish(self) -> None:
        try:
            self.arguments = _arguments("".join(self._text)[1:-1])
            self.done = True
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            self.failed = True


def is_key(name: str) -> bool:
    """Return True if an argument can have this name."""
    return name.strip() == name != "" and _NOT_IN_KEYS.search(name) is None


def _arguments(text: str) -> str:
    """Return the keyword arguments of a call, without its parentheses, as a JSON object."""
    values: dict[str, object] = {}
    for argument in _split(text):
        blank = _BLANK.match(argument)
        key, equals, value = argument[blank.end() if blank else 0 :].partition("=")
        key = key.rstrip()
        if not equals or not is_key(key):
            raise ValueError("not a call with keyword arguments alone")
        # Within parentheses, a value may have line breaks and end with a comment.
        expression = python_expression(f"dict(value={value}\n)")
        if not isinstance(expression, ast.Call) or len(expression.keywords) != 1:
            raise ValueError("a value that is no single expression")
        values[key] = _literal(expression.keywords[0].value)
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def _split(arguments: str) -> list[str]:
    """Return the texts between the commas that are in no string or bracket; a comma may be the last character."""
    parts, begin, depth = [], 0, 0
    for part in _PART.finditer(arguments):
        if part[0][0] in "\"'" and _FORMATTED.search(arguments, max(part.start() - 2, 0), part.start()):
            raise ValueError("a formatted string is no literal")
        depth += (part[0] in "([{") - (part[0] in ")]}")
        if part[0] == "," and depth == 0:
            parts.append(arguments[begin : part.start()])
            begin = part.end()
    last = arguments[begin:]
    return [*parts, last] if last.strip() else parts


def _literal(node: ast.expr) -> object:
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id not in _CONSTANTS:
            raise ValueError(f"the name {name.id} is no literal")
    return ast.literal_eval(_Constants().visit(node))


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.copy_location(ast.Constant(_CONSTANTS[node.id]), node)

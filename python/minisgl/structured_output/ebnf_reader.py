r"""Reads EBNF in the notation of GBNF (llama.cpp, xgrammar) into a tree of its rules.

    root   ::= expr "\n"                      # comments run to the end of the line
    expr   ::= term ([-+*/] term)*            # literals, classes, groups, | * + ? {m} {m,} {m,n}
    term   ::= "(" expr ")" | [0-9]{1,9}

A rule is a `Node`, in which literals and classes have become regular expressions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

MAX_REPETITION = 10_000
MAX_NESTING = 100  # groups within groups


class EbnfError(ValueError):
    """Error in a grammar; the message says what is wrong and where."""


@dataclass(frozen=True, slots=True)
class Chars:
    """Regular expression that matches a literal or one character."""

    expression: str


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    least: int
    most: int | None  # None: no limit


Node: TypeAlias = Chars | Ref | Sequence | Choice | Repeat


def read_ebnf(text: str) -> dict[str, Node]:
    """Return the grammar's rules by name; EbnfError if the text is not valid EBNF."""
    return _Parser(text).grammar()


_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<rule>(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)[ \t\r\n]*::=)
    |(?P<ref>[A-Za-z_][A-Za-z0-9_.-]*)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<class>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<bounds>\{[ \t]*(?P<least>[0-9]+)[ \t]*(?:(?P<comma>,)[ \t]*(?P<most>[0-9]*)[ \t]*)?\})
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._read(text)
        self._next = 0
        self._nesting = 0

    def _read(self, text: str) -> list[re.Match[str]]:
        tokens, at = [], 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(at, f"unexpected {text[at : at + 20]!r}")
            if match.lastgroup != "space":
                tokens.append(match)
            at = match.end()
        return tokens

    def _error(self, at: int, what: str) -> EbnfError:
        line = self._text.count("\n", 0, at) + 1
        return EbnfError(f"line {line}, column {at - self._text.rfind(chr(10), 0, at)}: {what}")

    @property
    def _kind(self) -> str:
        """Kind of the next token: the name of its group in `_TOKEN`, or the mark itself."""
        if self._next == len(self._tokens):
            return "end"
        token = self._tokens[self._next]
        return token["mark"] or str(token.lastgroup)

    def _take(self) -> re.Match[str]:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _unexpected(self) -> EbnfError:
        if self._next == len(self._tokens):
            return self._error(len(self._text), "unexpected end of the grammar")
        token = self._tokens[self._next]
        return self._error(token.start(), f"unexpected {token[0]!r}")

    def grammar(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind != "end":
            if self._kind != "rule":
                raise self._unexpected()
            token = self._take()
            if token["name"] in rules:
                raise self._error(token.start(), f"a second rule {token['name']!r}")
            rules[token["name"]] = self._choice()
        for token in self._tokens:
            if token["ref"] and token["ref"] not in rules:
                raise self._error(token.start(), f"there is no rule {token['ref']!r}")
        if "root" not in rules:
            raise EbnfError("there is no rule 'root'")
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._kind == "|":
            self._take()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._kind in ("ref", "literal", "class", "(", "."):
            items.append(self._repeated(self._item()))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node:
        kind, token = self._kind, self._take()
        match kind:
            case "ref":
                return Ref(token[0])
            case "literal":
                return Chars("".join(_quoted(char) for char in self._characters(token)))
            case "class":
                return Chars(self._class(token))
            case ".":
                return Chars("[^\\n]")
            case _:
                self._nesting += 1
                if self._nesting > MAX_NESTING:
                    raise self._error(token.start(), f"groups are nested deeper than {MAX_NESTING} levels")
                inner = self._choice()
                if self._kind != ")":
                    raise self._unexpected()
                self._take()
                self._nesting -= 1
                return inner

    def _repeated(self, item: Node) -> Node:
        for _ in range(MAX_NESTING):
            match self._kind:
                case "*":
                    item = Repeat(item, 0, None)
                case "+":
                    item = Repeat(item, 1, None)
                case "?":
                    item = Repeat(item, 0, 1)
                case "bounds":
                    item = Repeat(item, *self._bounds(self._tokens[self._next]))
                case _:
                    break
            self._take()
        return item

    def _bounds(self, token: re.Match[str]) -> tuple[int, int | None]:
        least = self._number(token, "least")
        most = least if token["comma"] is None else self._number(token, "most") if token["most"] else None
        if most is not None and most < least:
            raise self._error(token.start(), f"{token[0]} allows no number of repetitions")
        return least, most

    def _number(self, token: re.Match[str], group: str) -> int:
        digits = token[group].lstrip("0") or "0"
        if len(digits) > len(str(MAX_REPETITION)) or int(digits) > MAX_REPETITION:
            raise self._error(token.start(), f"at most {MAX_REPETITION} repetitions are supported")
        return int(digits)

    def _characters(self, token: re.Match[str]) -> list[str]:
        """Return the characters between the token's quotes or brackets, with escapes resolved."""
        text = token[0][1:-1]
        characters, at = [], 0
        while at < len(text):
            if text[at] != "\\":
                characters.append(text[at])
                at += 1
                continue
            escape = text[at + 1]
            digits = _HEX_DIGITS.get(escape)
            if digits is None:
                if escape.isalnum() and escape not in _ESCAPES:
                    raise self._error(token.start(), f"unknown escape \\{escape}")
                # A character that an escape makes is no range or negation.
                characters.append(_ESCAPES.get(escape, "\\" + escape))
                at += 2
                continue
            code = text[at + 2 : at + 2 + digits]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{digits}}}", code) or not _is_character(int(code, 16)):
                raise self._error(token.start(), f"\\{escape}{code} is no character")
            characters.append("\\" + chr(int(code, 16)))
            at += 2 + digits
        return characters

    def _class(self, token: re.Match[str]) -> str:
        characters = self._characters(token)
        negated = characters[:1] == ["^"]
        ranges, at = [], int(negated)
        while at < len(characters):
            first = last = characters[at][-1]
            if at + 2 < len(characters) and characters[at + 1] == "-":
                last = characters[at + 2][-1]
                if last < first:
                    raise self._error(token.start(), f"{first}-{last} is no range")
                at += 2
            ranges.append(_quoted(first) if first == last else f"{_quoted(first)}-{_quoted(last)}")
            at += 1
        if not ranges:
            raise self._error(token.start(), "an empty class matches nothing")
        return f"[{'^' if negated else ''}{''.join(ranges)}]"


def _is_character(code: int) -> bool:
    return code < 0xD800 or 0xE000 <= code < 0x110000


def _quoted(char: str) -> str:
    """Return a character as a regular expression; an escaped one has its backslash before it."""
    char = char[-1]
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"

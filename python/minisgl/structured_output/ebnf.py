r"""Translates EBNF in the notation of GBNF, which `ebnf_reader` reads, to llguidance's dialect of Lark.

GBNF has no lexer; llguidance has one, which is greedy: among the terminals that may come it takes the longest text.
So every part without recursion becomes one terminal, as large as possible: a grammar without recursion becomes one
regular expression, which is exact. Between the terminals of a recursive rule the lexer remains greedy: in
`x ::= y "a"` with `y ::= "(" x ")" | [a-z]+` the letters take every "a" that directly follows them.

llguidance's own converter, gbnf_to_lark, is not used: with 1.9 no grammar that has an escape like \u0041 compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from minisgl.structured_output.ebnf_reader import Chars, Choice, Node, Ref, Repeat, Sequence, read_ebnf


def ebnf_to_lark(text: str) -> str:
    """Return a grammar of the same language in llguidance's Lark; EbnfError if the text is not valid EBNF."""
    return _Printer(read_ebnf(text)).lark()


@dataclass(slots=True)
class _Printer:
    rules: dict[str, Node]
    lines: list[str] = field(default_factory=list)
    terminals: dict[str, str] = field(default_factory=dict)  # terminals made of rules without recursion
    nonterminals: dict[str, str] = field(default_factory=dict)
    regular: dict[str, bool] = field(default_factory=dict)

    def lark(self) -> str:
        for name in _depth_first(self.rules, self.rules):
            self.regular[name] = all(self.regular.get(other, False) for other in _references(self.rules[name]))
        for name in _depth_first(["root"], self.rules):
            if self.regular[name]:
                self._terminal(Ref(name))
        self.lines.append(f"start: {self._rule(Ref('root'))}")
        done = 0
        while done < len(self.nonterminals):  # printing a rule may name others
            name, printed = list(self.nonterminals.items())[done]
            self.lines.append(f"{printed}: {self._rule(self.rules[name])}")
            done += 1
        return "\n".join(self.lines)

    def _is_regular(self, node: Node) -> bool:
        return all(self.regular[name] for name in _references(node))

    def _rule(self, node: Node) -> str:
        """Return a part of a rule in Lark. Neighbours without recursion become one terminal."""
        if self._is_regular(node):
            return self._new_terminal(node)
        match node:
            case Ref(name):
                return self.nonterminals.setdefault(name, f"rule_{len(self.nonterminals)}")
            case Sequence(items):
                return " ".join(map(self._rule, self._joined(items)))
            case _:
                return _written(node, self._rule)

    def _joined(self, items: tuple[Node, ...]) -> list[Node]:
        """Return the items with neighbours without recursion joined."""
        joined: list[Node] = []
        for is_regular, group in groupby(items, self._is_regular):
            neighbours = tuple(group)
            joined += [Sequence(neighbours)] if is_regular and len(neighbours) > 1 else neighbours
        return joined

    def _new_terminal(self, node: Node) -> str:
        if isinstance(node, Ref):
            return self._terminal(node)
        name = f"PART_{len(self.lines)}"
        printed = self._terminal(node)
        self.lines.append(f"{name}: {printed}")
        return name

    def _terminal(self, node: Node) -> str:
        """Return a part of a terminal in Lark."""
        if not isinstance(node, Ref):
            return _written(node, self._terminal)
        if node.name not in self.terminals:
            printed = self._terminal(self.rules[node.name])
            self.terminals[node.name] = f"TERMINAL_{len(self.terminals)}"
            self.lines.append(f"{self.terminals[node.name]}: {printed}")
        return self.terminals[node.name]


def _written(node: Node, written: Callable[[Node], str]) -> str:
    """Return a node in Lark; `written` returns the nodes within it."""
    match node:
        case Chars(expression):
            return f"/{expression}/" if expression else '""'
        case Ref(name):
            return name
        case Sequence(items):
            return f"({' '.join(map(written, items))})" if items else '""'
        case Choice(options):
            return f"({' | '.join(map(written, options))})"
        case Repeat(item, least, most):
            return f"({written(item)}){{{least},{'' if most is None else most}}}"


def _references(node: Node) -> set[str]:
    """Return the rules that a node names."""
    found, stack = set(), [node]
    while stack:
        match stack.pop():
            case Ref(name):
                found.add(name)
            case Sequence(items) | Choice(items):
                stack += items
            case Repeat(item):
                stack.append(item)
            case Chars():
                pass
    return found


def _depth_first(roots: Iterable[str], rules: dict[str, Node]) -> list[str]:
    """Return the rules reachable from the roots, each after those that it names, except in cycles."""
    order: list[str] = []
    seen: set[str] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            name, is_done = stack.pop()
            if is_done:
                order.append(name)
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                stack += [(other, False) for other in sorted(_references(rules[name]))]
    return order

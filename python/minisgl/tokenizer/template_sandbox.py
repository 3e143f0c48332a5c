"""Jinja environment for chat templates: the sandbox of transformers, with bounds on time and size.

A template is a program from the model's publisher that runs on a client's data. Jinja has no endless loop, but loops
nest and macros recurse, so every call, look-up, filter and turn of a loop checks the deadline. An operation from which
Python would not return, because its result is huge ('a' * 10**10), is refused before it begins; results that double
from one operation to the next are refused once they are too long, and so are many long results that replace each
other. Constants are computed under the same rules when a template is compiled.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Sized
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 64 * 1024 * 1024
MAX_CHARS_IN_ALL = 64 * MAX_CHARS  # of all results of a rendering together, which take half a second to copy
MAX_SECONDS = 2.0  # of CPU time, in which no other prompt is encoded; the largest bodies need 0.3 with most templates
MAX_ITEMS = 1024 * 1024  # of nested lists and tables; a request's body has fewer
MAX_BITS = 4096  # bits of a number that a template computes
_LONG_NUMBER = re.compile(r"\d{7}")  # a format width of a million or more
# Filters whose names no template can write.
_EACH, _WHOLE, _SMALL = "each in time", "of a bounded length", "of a bounded number of items"


class Refusal(jinja2.TemplateError):
    """The template called raise_exception, or exceeded a bound."""


class _GenerationTag(jinja2.ext.Extension):
    """Tag {% generation %}, which marks the assistant's part for training and is only a scope here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Dialect of Jinja that chat templates are written in, with the bounds of this module."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded(filter_) for name, filter_ in self.filters.items()}
        self.filters[_EACH] = self._each
        self.filters[_WHOLE] = self._whole
        self.filters[_SMALL] = self._small
        del self.globals["lipsum"]  # makes any number of words in one call
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._begin()

    def _begin(self) -> None:
        self._end_of_cpu_time = time.thread_time() + MAX_SECONDS
        self._deadline = time.monotonic() + MAX_SECONDS
        self._chars_in_all = 0

    def compile_bounded(self, source: str) -> jinja2.Template:
        self._begin()
        return self.from_string(source)

    def render_bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        self._begin()
        parts: list[str] = []
        length = 0
        for part in template.generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARS:
                raise Refusal(f"its output is longer than {MAX_CHARS} characters")
            self._check_deadline()
        return "".join(parts)

    def _check_deadline(self) -> None:
        """Raise Refusal if the template has used up its CPU time, which takes longer on a busy machine."""
        if (now := time.monotonic()) > self._deadline:
            left = self._end_of_cpu_time - time.thread_time()  # asked for only now: it is a system call
            if left <= 0:
                raise Refusal(f"it runs for longer than {MAX_SECONDS:.0f} seconds")
            self._deadline = now + left

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Make every loop check the deadline, every concatenation (~) its length, and every literal list its items."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _EACH, [], [], None, None, lineno=loop.lineno)
        return _Results().visit(template)  # type: ignore[no-any-return]

    def _each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self._check_deadline()
            yield value

    def _whole(self, value: Any) -> Any:
        """Return the value; Refusal if it is longer than MAX_CHARS, or all together than MAX_CHARS_IN_ALL.

        Templates that add each message to a text (DeepSeek's do so with system messages) copy that text each time.
        """
        if isinstance(value, str | bytes | list | tuple):
            if len(value) > MAX_CHARS:
                raise Refusal(f"it makes a text or list longer than {MAX_CHARS}")
            self._chars_in_all += len(value)
            if self._chars_in_all > MAX_CHARS_IN_ALL:
                raise Refusal(f"it makes texts and lists longer than {MAX_CHARS_IN_ALL} in all")
        return value

    def _small(self, value: Any) -> Any:
        """Return the value; Refusal if it has more than MAX_ITEMS items, each counted as often as it is nested.

        Sixty lists that each hold the one before twice take no memory, but no time is enough to print or compare them.
        """
        count, left = 0, [value]
        while left:
            items = left.pop()
            if isinstance(items, jinja2.utils.Namespace):
                items = object.__getattribute__(items, "_Namespace__attrs")
            count += len(items)
            if count > MAX_ITEMS:
                raise Refusal(f"it nests more than {MAX_ITEMS} items")
            members = chain(items, items.values()) if isinstance(items, dict) else items
            left += [member for member in members if isinstance(member, _CONTAINERS)]
        return value

    def _check_arguments(self, name: str, value: Any, args: list[Any]) -> None:
        """Raise Refusal if calling this method or filter of a value would make a text longer than MAX_CHARS."""
        self._check_deadline()
        if any(isinstance(arg, int) and abs(arg) > MAX_CHARS for arg in args):
            raise Refusal(f"it calls {name} with a number beyond {MAX_CHARS}")
        if name == "format" and isinstance(value, str) and _LONG_NUMBER.search(value):
            raise Refusal("it formats with a number of more than six digits")
        match name, value, args:
            case "replace", str(), [str(old), str(new), *_]:
                length = len(value) + value.count(old) * len(new)
            case "join", str(), [Sized() as items, *_]:
                length = len(value) * len(items)
            case "join", Sized(), [str(separator), *_]:
                length = len(value) * len(separator)
            case "indent", str(), [int(width), *_]:
                length = (value.count("\n") + 1) * width
            case "indent", str(), [str(width), *_]:
                length = (value.count("\n") + 1) * len(width)
            case _:
                return
        if length > MAX_CHARS:
            raise Refusal(f"it makes a text longer than {MAX_CHARS} characters")

    def _bounded(self, filter_: Callable[..., Any]) -> Callable[..., Any]:
        name = filter_.__name__.removeprefix("sync_").removeprefix("do_")
        first = 1 if hasattr(filter_, "jinja_pass_arg") else 0  # Jinja passes the environment or context before it

        @functools.wraps(filter_)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value = args[first] if len(args) > first else None
            self._check_arguments(name, value, [*args[first + 1 :], *kwargs.values()])
            return self._whole(filter_(*args, **kwargs))

        return bounded

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, Sized) else 0 for side in (left, right)]
        if operator == "*" and any(sizes):
            times = right if isinstance(right, int) else left
            if isinstance(times, int) and max(sizes) * times > MAX_CHARS:
                raise Refusal(f"it makes a text or list longer than {MAX_CHARS}")
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise Refusal(f"it computes a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str) and ("*" in left or _LONG_NUMBER.search(left)):
            raise Refusal("it formats with a number of more than six digits")
        return self._whole(super().call_binop(context, operator, left, right))

    def call(
        __self,  # Jinja's name, so that a template may pass a keyword called self
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        if (value := getattr(method, "__self__", None)) is not None:
            __self._check_arguments(getattr(method, "__name__", ""), value, [*args, *kwargs.values()])
        __self._check_deadline()
        if __obj is dict or __obj is jinja2.utils.Namespace:
            __self._small([*args, *kwargs.values()])
        return __self._whole(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_deadline()
        return super().getitem(obj, argument)


_CONTAINERS = (list, tuple, dict, jinja2.utils.Namespace)


class _Results(jinja2.visitor.NodeTransformer):
    """Applies the filter `_WHOLE` to every a ~ b, and `_SMALL` to every [a, b], (a, b) and {a: b}."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _WHOLE)

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SMALL)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SMALL) if node.ctx == "load" else node

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SMALL)


def _filtered(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter, which do not belong into a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

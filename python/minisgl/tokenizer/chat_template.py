"""Renders conversations with the Jinja templates that models bring, as Hugging Face transformers does.

A template is a program from the model's publisher that runs on a client's data, so it runs in Jinja's sandbox, for a
bounded time and to a bounded length, and whatever goes wrong in it is the one request's error (InvalidRequest).
"""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.config import ConfigError
from minisgl.core import InvalidRequest
from minisgl.tokenizer.harmony_messages import harmony_kwargs, harmony_messages, is_harmony

logger = logging.getLogger(__name__)

MAX_CHARS = 64 * 1024 * 1024
MAX_SECONDS = 5.0

Message = dict[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same thing, the standard one first
_USED = ("default", "tool_use")
_END_TAG = "END-OF-FINAL-MESSAGE-f1b2c7 "  # marks where a message that is to be continued ends


class ChatTemplates:
    """Chat templates of a model, by name. `variables` are what every template sees (bos_token and so on).

    ConfigError if one of those that are used cannot be compiled.
    """

    def __init__(self, sources: dict[str, str], variables: dict[str, str], model_name: str = "") -> None:
        self._sources = sources
        self._variables = variables
        self._model_name = model_name
        self._environment = _Environment()
        self._compiled = {name: self._compile(name) for name in _USED if name in sources}

    @property
    def takes_pairs(self) -> bool:
        """True if the default template knows the roles query and document, as those of rerankers do."""
        source = self._sources.get("default", "")
        return all(re.search(f"[\"']{role}[\"']", source) for role in ("query", "document"))

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render the conversation as one text, special tokens written out; InvalidRequest if the template fails.

        With `continue_final_message` the text ends where the last message's content does.
        """
        if not messages:
            raise InvalidRequest("messages", "messages must have at least one message")
        name, template_kwargs = self._choose(tools), template_kwargs or {}
        knows_developer = "developer" in self._sources[name]
        normalized = [_normalize(message, knows_developer) for message in messages]
        if is_harmony(self._sources[name]):
            normalized, template_kwargs = harmony_messages(normalized), harmony_kwargs(template_kwargs)
        if continue_final_message:
            normalized[-1]["content"] = f"{normalized[-1].get('content', '')}{_END_TAG}"
        variables: dict[str, Any] = {
            "messages": normalized,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        if reserved := variables.keys() & template_kwargs.keys():
            raise InvalidRequest("chat_template_kwargs", f"{min(reserved)} cannot be given in chat_template_kwargs")
        variables = {**self._variables, "documents": None, **template_kwargs, **variables}
        try:
            text = self._environment.render_bounded(self._compiled[name], variables)
            return _cut_at_end_tag(text) if continue_final_message else text
        except Refusal as error:
            message = f"the model's chat template refuses these messages: {error}"
        except jinja2.TemplateError as error:
            message = f"the model's chat template cannot render these messages: {error}"
        except Exception:  # raised by Python: its text says nothing to a client
            logger.warning("the chat template %s of %s fails", name, self._model_name, exc_info=True)
            message = "the model's chat template fails on these messages"
        raise InvalidRequest("messages", message)

    def _compile(self, name: str) -> jinja2.Template:
        try:
            return self._environment.compile_bounded(self._sources[name])
        except Exception as error:
            where = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(
                f"the chat template {name} of the model {self._model_name} cannot be compiled: "
                f"{type(error).__name__}{where}: {error}"
            ) from error

    def _choose(self, tools: list[dict[str, Any]] | None) -> str:
        if tools is not None and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        have = f"none of its templates ({', '.join(sorted(self._sources))}) is the default" if self._sources else ""
        raise InvalidRequest(
            "messages",
            f"the model {self._model_name} has no chat template{': ' if have else ''}{have}; send it a plain prompt",
        )


class Refusal(jinja2.TemplateError):
    """The template called raise_exception, or went beyond its bounds."""


def _normalize(message: Message, knows_developer: bool) -> Message:
    """Prepare a message as transformers does: templates expect absent keys, not None, and one name for reasoning.

    Beyond that, the newer name of the system's role is changed for templates that would drop it without a word, and
    arguments of tool calls, which OpenAI's API has as text, become what templates expect.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if message.get("role") == "developer" and not knows_developer:
        message["role"] = "system"
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    return message


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(text, value)}} if isinstance(value, dict) else call


class _Arguments(dict[str, Any]):
    """Arguments of a call as most templates expect them: an object, which in a text reads as it was written.

    Some templates join them to strings (DeepSeek's), so they must be both.
    """

    def __init__(self, text: str, value: dict[str, Any]) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _cut_at_end_tag(text: str) -> str:
    at = text.rfind(_END_TAG.strip())
    if at < 0:
        raise Refusal("it does not show the last message, which is to be continued")
    # A template that trims the tag would have trimmed the message.
    return text[:at] if text.startswith(_END_TAG, at) else text[:at].rstrip()


class _GenerationTag(jinja2.ext.Extension):
    """Tag {% generation %}, which marks the assistant's part for training. Here it only is a scope."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """Dialect that chat templates are written in, with a deadline and a limit on every value that it makes.

    Jinja has no endless loop, but loops nest and macros recurse: every call, look-up, filter and turn of a loop checks
    the clock. A single operation that Python would not return from ('a' * 10**10) is refused before it begins, and what
    doubles from one to the next when it is too long. Constants are computed under the same rules when a template is
    compiled.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded(filter_) for name, filter_ in self.filters.items()}
        self.filters[_EACH] = self._each
        self.filters[_WHOLE] = self._whole
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._deadline = 0.0

    def compile_bounded(self, source: str) -> jinja2.Template:
        self._deadline = time.monotonic() + MAX_SECONDS
        return self.from_string(source)

    def render_bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        self._deadline = time.monotonic() + MAX_SECONDS
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
        if time.monotonic() > self._deadline:
            raise Refusal(f"it runs for longer than {MAX_SECONDS:.0f} seconds")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Let every loop check the clock, and every concatenation (~) its length."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _EACH, [], [], None, None, lineno=loop.lineno)
        return _Concatenations().visit(template)  # type: ignore[no-any-return]

    def _each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self._check_deadline()
            yield value

    def _whole(self, value: Any) -> Any:
        """Return the value if it is no longer than a text may be."""
        if isinstance(value, str | bytes | list | tuple) and len(value) > MAX_CHARS:
            raise Refusal(f"it makes a text or list longer than {MAX_CHARS}")
        return value

    def _check_arguments(self, name: str, value: Any, args: list[Any]) -> None:
        """Refuse a call of this method or filter of a value that would make something longer than a text may be."""
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
        first = 1 if hasattr(filter_, "jinja_pass_arg") else 0  # behind the environment or context

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
        return __self._whole(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_deadline()
        return super().getitem(obj, argument)


MAX_BITS = 4096  # bits of a number that a template computes
_LONG_NUMBER = re.compile(r"\d{7}")  # a width of a million and more
_EACH, _WHOLE = "each in time", "of a bounded length"  # filters that no template can name


class _Concatenations(jinja2.visitor.NodeTransformer):
    """Puts a check behind every a ~ b."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return jinja2.nodes.Filter(node, _WHOLE, [], [], None, None, lineno=node.lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML of Jinja's own filter, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

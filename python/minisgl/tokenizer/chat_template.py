"""Renders conversations with the Jinja templates that models bring, as Hugging Face transformers does.

A template is a program from the model's publisher that runs on a client's data, so it runs in Jinja's sandbox, for a
bounded time and to a bounded length, and whatever goes wrong in it is the one request's error (InvalidRequest).
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.core import InvalidRequest

MAX_CHARS = 64 * 1024 * 1024
MAX_SECONDS = 5.0

Message = dict[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same thing, the standard one first


class ChatTemplates:
    """A model's chat templates, by name. `variables` are what every template sees (bos_token and so on)."""

    def __init__(self, sources: dict[str, str], variables: dict[str, str], model_name: str = "") -> None:
        self._sources = sources
        self._variables = variables
        self._model_name = model_name
        self._environment = _Environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as one text, special tokens written out. Any failure is an InvalidRequest("messages")."""
        if not messages:
            raise InvalidRequest("messages", "messages must have at least one message")
        variables: dict[str, Any] = {
            "messages": [_normalize(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if reserved := variables.keys() & template_kwargs.keys():
            raise InvalidRequest("chat_template_kwargs", f"{min(reserved)} cannot be given in chat_template_kwargs")
        variables = {**self._variables, "documents": None, **template_kwargs, **variables}
        name = self._choose(tools)
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            return self._environment.render_bounded(self._compiled[name], variables)
        except Refusal as error:
            message = f"the model's chat template refuses these messages: {error}"
        except Exception as error:
            message = f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
        raise InvalidRequest("messages", message)

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


def _normalize(message: Message) -> Message:
    """What transformers does to a message: templates expect absent keys, not None, and one name for reasoning."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's part for training. Here it only is a scope."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The dialect that chat templates are written in, with a deadline.

    Jinja has no endless loop, but loops nest and macros recurse: every call and every look-up checks the clock.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._deadline = 0.0

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

    def call(
        __self,  # as in Jinja, so that a template may pass a keyword called self
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __self._check_deadline()
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_deadline()
        return super().getitem(obj, argument)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

"""Renders conversations with the Jinja templates that models bring, as Hugging Face transformers does.

Templates run in a sandbox (`template_sandbox`); whatever goes wrong in one becomes an InvalidRequest of its request.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

import jinja2

from minisgl.config import ConfigError
from minisgl.message.to_tokenizer import ConversationMessage
from minisgl.sampling_params import InvalidRequest
from minisgl.tokenizer.conversation import REASONING_NAMES
from minisgl.tokenizer.harmony_messages import harmony_kwargs, harmony_messages, is_harmony
from minisgl.tokenizer.template_sandbox import Refusal, TemplateSandbox

logger = logging.getLogger(__name__)


_USED = ("default", "tool_use")  # names of the templates that are used
_LOG_SECONDS = 1.0  # between two tracebacks: a client can make a template fail in each of its requests
_MAX_ARGUMENT_VALUES = 2**18  # of all calls of a conversation; a body may have as many
_STRING = re.compile(r'"(?:[^"\\]|\\.?)*+"?', re.DOTALL)
_END_TAG = "END-OF-FINAL-MESSAGE-f1b2c7 "  # put after the message to continue, to find its end in the text


class ChatTemplates:
    """Chat templates of a model, by name. `variables` are given to every template (bos_token and so on).

    ConfigError if one of the `_USED` templates cannot be compiled.
    """

    def __init__(self, sources: dict[str, str], variables: dict[str, str], model_name: str = "") -> None:
        self._sources = sources
        self._variables = variables
        self._model_name = model_name
        self._environment = TemplateSandbox()
        self._logged = -math.inf  # `time.monotonic` of the last traceback
        self._compiled = {name: self._compile(name) for name in _USED if name in sources}

    @property
    def takes_pairs(self) -> bool:
        """True if the default template has the roles query and document, as templates of rerankers do."""
        source = self._sources.get("default", "")
        return all(re.search(f"[\"']{role}[\"']", source) for role in ("query", "document"))

    def render(
        self,
        messages: list[ConversationMessage],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the conversation as one text with special tokens written out; InvalidRequest if the template fails.

        The messages are in the form of `template_messages`. With `continue_final_message` the text ends with the
        content of the last one.
        """
        if not messages:
            raise InvalidRequest("messages", "messages must have at least one message")
        name, template_kwargs = self._choose(tools), template_kwargs or {}
        _check_arguments(messages)
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
        except RecursionError:  # by a client's nesting: its traceback has thousands of lines
            message = "the model's chat template cannot render these messages: they are nested too deeply"
        except Exception:  # from Python code: its text would mean nothing to a client
            self._log_failure(name)
            message = "the model's chat template fails on these messages"
        raise InvalidRequest("messages", message)

    def _log_failure(self, name: str) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logger.warning("the chat template %s of %s fails", name, self._model_name, exc_info=True)

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
        others = f": none of its templates ({', '.join(sorted(self._sources))}) is the default" if self._sources else ""
        raise InvalidRequest(
            "messages", f"the model {self._model_name} has no chat template{others}; send it a plain prompt"
        )


def _normalize(message: ConversationMessage, knows_developer: bool) -> ConversationMessage:
    """Return a message as transformers prepares it: without None values, and with one name for reasoning.

    In addition, the role `developer` becomes `system` for templates that would silently drop it, and the arguments of
    tool calls, which are text in OpenAI's API, become objects.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING_NAMES if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if message.get("role") == "developer" and not knows_developer:
        message["role"] = "system"
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    return message


def _check_arguments(messages: Iterable[ConversationMessage]) -> None:
    """Raise InvalidRequest if the arguments of all calls have too many values.

    They are JSON within a text, which the limits on a body's values do not see: 8 MB of empty lists take 0.2 GB.
    """
    calls = chain.from_iterable(message.get("tool_calls") or () for message in messages)
    texts = [text for call in calls if (text := _arguments_text(call)) is not None]
    if sum(map(_most_values, texts)) <= _MAX_ARGUMENT_VALUES:
        return
    if sum(_most_values(_STRING.sub("", text)) for text in texts) > _MAX_ARGUMENT_VALUES:
        raise InvalidRequest(
            "messages", f"messages: the arguments of all tool calls have more than {_MAX_ARGUMENT_VALUES} values"
        )


def _most_values(text: str) -> int:
    """Return the number of values of a JSON text, or more if its strings have punctuation."""
    return text.count(",") + text.count("[") + text.count("{")


def _arguments_text(call: dict[str, Any]) -> str | None:
    """Return the arguments of a call if they are text, which may be JSON."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else None


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if (text := _arguments_text(call)) is None:
        return call
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": _Arguments(text, value)}}


class _Arguments(dict[str, Any]):
    """Arguments of a call: an object, as most templates expect, which turns into the original text in a string.

    Some templates (DeepSeek's) concatenate the arguments with strings, so they must be both.
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
    # If the template trimmed the tag's space, it would have trimmed the end of the message too.
    kept = text[:at] if text.startswith(_END_TAG, at) else text[:at].rstrip()
    return kept.replace(_END_TAG, "").replace(_END_TAG.strip(), "")  # a template may show the message twice

"""One conversation: its turns, its sampling fields, and the loop of questions, answers and commands.

Ctrl-C during an answer cancels the request by closing its connection; what had come stays in the conversation.
"""

from __future__ import annotations

import asyncio
import json
import time
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from minisgl.limits import UNLIMITED
from minisgl.sampling_params import InvalidRequest, SamplingParams
from minisgl.shell.chat_client import ChatClient, ChatError

# Fields that the user cannot set: the shell would not show their effect, or requests have no field of this name.
_HIDDEN = ("logprobs", "prompt_logprobs", "grammar", "bad_words_ids")
_KINDS = {name: kind for name, kind in typing.get_type_hints(SamplingParams).items() if name not in _HIDDEN}
SAMPLING_FIELDS = tuple(_KINDS)
DEFAULT = "default"  # the word that takes a field's value away
HELP = {
    "/help": "this list",
    "/reset": "forget the conversation (the system message and the settings stay)",
    "/save FILE": "write the conversation to FILE.json (as the body of a request) or FILE.md",
    "/system TEXT": "set the system message; a lone - takes it away, without TEXT it is shown",
    "/set NAME VALUE": f"set a sampling field ({DEFAULT}: the server's value); without VALUE, or alone, show",
    "/exit": "end (also Ctrl-D)",
}
COMMANDS = tuple(usage.split()[0] for usage in HELP)
KEYS = (
    "Enter sends; Alt-Enter (or Esc, then Enter) or a backslash at the end of a line begins a new line. "
    "Ctrl-C stops an answer. A message that begins with a slash is written with two."
)
CONTINUES = "\\"  # at the end of a line
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class AnswerView(Protocol):
    """Shows an answer while it comes."""

    def add(self, text: str) -> None: ...

    def think(self, text: str) -> None:
        """Show a part of the reasoning before the answer."""


class View(Protocol):
    """The terminal or pipe that questions come from and answers go to."""

    interactive: bool  # True for a person: errors and Ctrl-C do not end the program

    def ask(self) -> str:
        """Return the next question or command. EOFError at the end, KeyboardInterrupt when it is taken back."""

    def answer(self) -> AbstractContextManager[AnswerView]:
        """Show one answer within a `with` block; leaving the block shows all text that has arrived."""

    def note(self, text: str) -> None: ...

    def error(self, text: str) -> None: ...


class Sampling:
    """The sampling fields that the user has set. Other fields are not sent, so the server's defaults hold."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def set(self, name: str, text: str) -> None:
        """Set a value as it was typed, or the default; ValueError with one line if the value is wrong."""
        if name not in _KINDS:
            raise ValueError(f"{name} is not a sampling field; known are {', '.join(SAMPLING_FIELDS)}")
        values = {key: value for key, value in self._values.items() if key != name}
        if text != DEFAULT:
            try:
                values[name] = msgspec.convert(_read(text, _KINDS[name]), _KINDS[name], strict=False)
                SamplingParams(**values).validate(UNLIMITED)  # the server checks its own limits
            except msgspec.ValidationError as error:
                raise ValueError(f"{name} cannot be {text!r}: {str(error)[:1].lower()}{str(error)[1:]}") from None
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        self._values = values

    def get(self, name: str) -> str:
        """Return a field's value as it would be typed."""
        fields = self.fields()
        return json.dumps(fields[name], ensure_ascii=False) if name in fields else DEFAULT

    def fields(self) -> dict[str, Any]:
        """Return the fields as a request's body has them."""
        fields = dict(self._values)
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"]}
        return fields


def _read(text: str, kind: Any) -> Any:
    """Return what msgspec converts: a scalar's text; a list, from JSON or of one element; an object's pairs."""
    kinds = [one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is tuple]
    if not kinds:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(value, dict) and len(kinds) > 1:  # a tuple of tuples
        return list(value.items())
    if isinstance(value, list):
        return value
    return [value if isinstance(value, str) else text]


@dataclass(slots=True)
class Conversation:
    """The turns so far, alternately question and answer, under one system message."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """Return the messages of a request's body, with a new question at the end."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [] if question is None else [{"role": "user", "content": question}]
        return system + self.turns + asked

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def save(self, path: Path, model: str, sampling: dict[str, Any]) -> None:
        """Write the conversation as a request body (.json) or as text (.md). ValueError for another ending; OSError."""
        if path.suffix == ".json":
            body = {"model": model, **sampling, "messages": self.messages()}
            text = json.dumps(body, ensure_ascii=False, indent=2) + "\n"
        elif path.suffix in (".md", ".markdown"):
            text = f"# Conversation with {model}\n" + "".join(
                f"\n## {message['role'].capitalize()}\n\n{message['content']}\n" for message in self.messages()
            )
        else:
            raise ValueError(f"the name of the file must end in .json or .md, not {path.suffix or path.name!r}")
        path.write_text(text, encoding="utf-8")


@dataclass(slots=True)
class TimedAnswer:
    """One answer and its times, in seconds after the question was sent."""

    text: str = ""
    pieces: int = 0
    tokens: int | None = None  # None: the stream ended before the server sent it
    finish: str | None = None
    first: float | None = None
    last: float = 0.0

    def took(self, piece: bool, now: float) -> None:
        if piece:
            self.first = now if self.first is None else self.first
            self.pieces += 1
            self.last = now

    def describe(self) -> str:
        """Return tokens, their rate and the time to the first in one line."""
        tokens = self.pieces if self.tokens is None else self.tokens
        about = "about " if self.tokens is None else ""
        parts = [f"{about}{tokens} token{'s' if tokens != 1 else ''}"]
        if self.first is not None and self.last > self.first and tokens > 1:
            parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first after {self.first:.2f} s")
        if self.finish == "length":
            parts.append("cut at the token limit")
        return ", ".join(parts)


class Session:
    """One conversation with one model."""

    def __init__(self, client: ChatClient, model: str, view: View, runner: asyncio.Runner) -> None:
        self.conversation = Conversation()
        self.sampling = Sampling()
        self._client = client
        self._model = model
        self._view = view
        self._runner = runner
        self._failed = False
        self._is_answering = False
        self._must_end = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/save": self._save,
            "/system": self._system,
            "/set": self._set,
        }

    def run(self) -> int:
        """Run until the end of the input or /exit. Without a person at the terminal, return 1 if something failed."""
        while True:
            try:
                text = self._view.ask()
                if text.strip() in ("/exit", "/quit"):
                    break
                self._handle(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._view.interactive:
                    return EXIT_INTERRUPTED
        return int(self._failed and not self._view.interactive)

    def terminate(self) -> None:
        """End the program as SIGTERM does, after the current answer, or at once on a second call.

        A server that shuts down finishes its answers, and signals its shell before the shell has shown the last one.
        """
        if self._is_answering and not self._must_end:
            self._must_end = True
        else:
            raise SystemExit(EXIT_TERMINATED)  # through every `finally`, so that the terminal gets its modes back

    def _handle(self, text: str) -> None:
        if not text.strip():
            return
        if not text.startswith("/") or text.startswith("//"):
            self._ask(text[1:] if text.startswith("//") else text)
            return
        name, _, argument = text.partition(" ")
        command = self._commands.get(name.strip())
        if command is None:
            self._fail(f"there is no command {name.strip()}; /help lists them")
            return
        try:
            command(argument.strip())
        except ValueError as error:
            self._fail(str(error))

    def _fail(self, text: str) -> None:
        self._failed = True
        self._view.error(text)

    # --- the question -----------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        answer = TimedAnswer()
        self._is_answering = True
        try:
            with self._view.answer() as shown:
                self._runner.run(self._stream(question, answer, shown))
        except ChatError as error:
            self._fail(str(error))
            return
        except KeyboardInterrupt:
            if answer.text:
                self.conversation.add(question, answer.text)
            self._view.note(f"stopped: {answer.describe()}")
            if not self._view.interactive:
                raise
            return
        finally:
            self._is_answering = False
        self.conversation.add(question, answer.text)
        self._view.note(answer.describe())
        if self._must_end:
            self.terminate()

    async def _stream(self, question: str, answer: TimedAnswer, shown: AnswerView) -> None:
        body = {"model": self._model, **self.sampling.fields(), "messages": self.conversation.messages(question)}
        begin = time.perf_counter()
        async with aclosing(self._client.chat(body)) as chunks:
            async for chunk in chunks:
                answer.took(bool(chunk.text or chunk.reasoning), time.perf_counter() - begin)
                answer.finish = chunk.finish or answer.finish
                answer.text += chunk.text
                if chunk.reasoning:
                    shown.think(chunk.reasoning)
                if chunk.text:
                    shown.add(chunk.text)
                if chunk.usage is not None:
                    answer.tokens = chunk.usage.completion_tokens

    # --- the commands -----------------------------------------------------------------------------------------

    def _help(self, _argument: str) -> None:
        width = max(map(len, HELP))
        self._view.note("\n".join([*(f"{usage:{width}}  {text}" for usage, text in HELP.items()), KEYS]))

    def _reset(self, _argument: str) -> None:
        self.conversation.turns.clear()
        self._view.note("a new conversation")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ValueError("/save needs the name of a file that ends in .json or .md")
        path = Path(argument).expanduser()
        replaced = " (replaced)" if path.exists() else ""
        try:
            self.conversation.save(path, self._model, self.sampling.fields())
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None
        self._view.note(f"saved {len(self.conversation.messages())} messages to {path}{replaced}")

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = "" if argument == "-" else argument
        self._view.note(f"system: {self.conversation.system or '(none)'}")

    def _set(self, argument: str) -> None:
        name, _, value = argument.replace("=", " ", 1).partition(" ")
        if value.strip():
            self.sampling.set(name, value.strip())
        elif name and name not in SAMPLING_FIELDS:
            self.sampling.set(name, DEFAULT)  # the error lists the fields
        names = [name] if name else SAMPLING_FIELDS
        self._view.note("\n".join(f"{name} = {self.sampling.get(name)}" for name in names))

"""What has been said, and the sampling fields that go with every question. Pure."""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from minisgl.core import InvalidRequest, SamplingParams
from minisgl.limits import Limits

Message = dict[str, str]

_ANY = Limits(max_seq_len=2**31 - 1, vocab_size=2**31 - 1)  # the server knows its own
# Not the user's to set: what the shell would not show, and what requests' bodies do not have under this name.
_HIDDEN = ("logprobs", "prompt_logprobs", "grammar", "bad_words_ids")
_KINDS = {name: kind for name, kind in typing.get_type_hints(SamplingParams).items() if name not in _HIDDEN}
SAMPLING_FIELDS = tuple(_KINDS)
DEFAULT = "default"  # the word that takes a field's value away


class Sampling:
    """The sampling fields that the user has set. What is not set is not sent: the server's default holds."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def set(self, name: str, text: str) -> None:
        """Take a value as it was typed, or `default`; ValueError with one line if it cannot be."""
        if name not in _KINDS:
            raise ValueError(f"{name} is not a sampling field; known are {', '.join(SAMPLING_FIELDS)}")
        values = {key: value for key, value in self._values.items() if key != name}
        if text != DEFAULT:
            try:
                values[name] = msgspec.convert(_read(text, _KINDS[name]), _KINDS[name], strict=False)
                SamplingParams(**values).validate(_ANY)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name} cannot be {text!r}: {str(error)[:1].lower()}{str(error)[1:]}") from None
            except InvalidRequest as error:
                raise ValueError(error.message) from None
        self._values = values

    def get(self, name: str) -> str:
        """A field's value as it would be typed."""
        fields = self.fields()
        return json.dumps(fields[name], ensure_ascii=False) if name in fields else DEFAULT

    def fields(self) -> dict[str, Any]:
        """As a request's body has them."""
        fields = dict(self._values)
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"]}
        return fields


def _read(text: str, kind: Any) -> Any:
    """Scalars are converted from their text; a list may be JSON, or one element as it stands; pairs are an object."""
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
    """The turns so far, question and answer by turns, under one system message."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[Message]:
        """As a request's body has them, with a new question at the end."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [] if question is None else [{"role": "user", "content": question}]
        return system + self.turns + asked

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def save(self, path: Path, model: str, sampling: dict[str, Any]) -> None:
        """Write it: as the body of a request (.json), or to be read (.md). ValueError for another name; OSError."""
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

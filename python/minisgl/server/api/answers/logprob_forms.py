"""Log-probabilities as clients know them: OpenAI's two forms, chat's and the older one of completions, and vLLM's.

A token's own value and its entry among the alternatives are the same number bit for bit, so that clients may compare.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from minisgl.message.types import PositionLogprobs, TokenLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class ChatTopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The older form, of completions: parallel lists, an entry a token. The first token of a prompt has no values."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def join(cls, parts: Sequence[TextLogprobs]) -> TextLogprobs:
        """Return the parts one after the other."""
        return cls(
            [token for part in parts for token in part.tokens],
            [logprob for part in parts for logprob in part.token_logprobs],
            [top for part in parts for top in part.top_logprobs],
            [offset for part in parts for offset in part.text_offset],
        )


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]  # by token id; the prompt's first token has none


def token_text(text: bytes) -> str:
    """Return a token as text. One that is a part of a character is written as OpenAI does, in escaped bytes."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def value(token: TokenLogprob) -> float:
    return max(token.logprob, LOWEST)


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
    """Return chat's form, with as many alternatives as there are."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token_text(position.chosen.text),
                value(position.chosen),
                list(position.chosen.text),
                [ChatTopLogprob(token_text(top.text), value(top), list(top.text)) for top in position.top],
            )
            for position in positions
        ]
    )


def prompt_logprobs(positions: Sequence[PositionLogprobs], top: int) -> PromptLogprobs:
    """Return vLLM's form: for each token of the prompt its own value and the alternatives by id; the first has none."""
    found: PromptLogprobs = [None]
    for position in positions:
        ranked = [*enumerate(position.top[:top], start=1), (position.rank, position.chosen)]
        found.append(
            {str(token.token): PromptLogprob(value(token), rank, token_text(token.text)) for rank, token in ranked}
        )
    return found


class TextLogprobsWriter:
    """The form of completions, for one choice, in pieces: each token's offset in the text goes on from the last's."""

    def __init__(self, top: int, *, skip_special_tokens: bool = True) -> None:
        self._top = top
        self._skips_special = skip_special_tokens
        self._length = _Length()  # length of the text so far

    def prompt(self, first_token: bytes, text: str, positions: Sequence[PositionLogprobs]) -> TextLogprobs:
        """Return the echo of a prompt: `text` as it is written, and the tokens; the first has no probability."""
        first = TextLogprobs([token_text(first_token)], [None], [None], [0])
        if _begins(text, first_token):  # and not a special token in front of the text
            self._length.add(first_token)
        rest = self._write(positions, text)
        self._length = _Length(len(text))
        return TextLogprobs.join([first, rest])

    def write(self, positions: Sequence[PositionLogprobs]) -> TextLogprobs:
        """Return the tokens that follow."""
        return self._write(positions, None)

    def _write(self, positions: Sequence[PositionLogprobs], prompt: str | None) -> TextLogprobs:
        result = TextLogprobs([], [], [], [])
        for position in positions:
            chosen = position.chosen
            result.tokens.append(token_text(chosen.text))
            result.token_logprobs.append(value(chosen))
            result.top_logprobs.append(self._alternatives(position))
            result.text_offset.append(self._length.characters)
            self._length.add(self._shown(position) if prompt is None else self._shown_in(prompt, position))
        return result

    def _shown(self, position: PositionLogprobs) -> bytes:
        """Return what the token is in the text of an answer."""
        return b"" if position.special and self._skips_special else position.chosen.text

    def _shown_in(self, prompt: str, position: PositionLogprobs) -> bytes:
        """Return what the token is in the prompt's text, which has only the special ones that were written."""
        text, at = position.chosen.text, self._length.characters
        if position.special and not prompt.startswith(text.decode(errors="replace"), at):
            return b""
        if at == 0 and text.startswith(b" ") and not prompt.startswith(" "):
            return text[1:]  # the tokens of some vocabularies lose a space at the start of a text
        return text

    def _alternatives(self, position: PositionLogprobs) -> dict[str, float]:
        """Return the most likely tokens, and the token itself. Of tokens that read alike the most likely counts."""
        found: dict[str, float] = {}
        for token in (*position.top[: self._top], position.chosen):
            found.setdefault(token_text(token.text), value(token))
        return found


class _Length:
    """Number of characters that the UTF-8 of a text's tokens reads as; what is no UTF-8 reads as U+FFFD."""

    def __init__(self, characters: int = 0) -> None:
        self._complete = characters
        self._begun = b""  # the beginning of another

    def add(self, data: bytes) -> None:
        data = self._begun + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._complete += len(text)
        self._begun = data[used:]

    @property
    def characters(self) -> int:
        return self._complete + len(self._begun.decode(errors="replace"))


def _begins(text: str, token: bytes) -> bool:
    """Return True if the text begins with this token, which may be a part of a character or of none."""
    return text[: len(token)].encode().startswith(token) or text.startswith(token.decode(errors="replace"))


def mean_logprob(positions: Sequence[PositionLogprobs]) -> float:
    """Return how likely a text is, whatever its length: the best of several is chosen by it."""
    return sum(value(position.chosen) for position in positions) / len(positions) if positions else LOWEST

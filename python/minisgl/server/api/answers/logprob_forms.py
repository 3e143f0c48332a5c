"""Log-probabilities in the forms of the APIs: OpenAI's for chats, OpenAI's older one for completions, and vLLM's.

A token's own value and its entry among the alternatives are the same number bit for bit, so that clients may compare.
Lists that may have many values are encoded here, a few values at a time (`JsonList`): a struct's field has one where
its type says list.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias, cast

import msgspec

from minisgl.message.logprobs import PositionLogprobs, TokenLogprob
from minisgl.server.api.answers.large_json import VALUES_A_PIECE, JsonList, slices

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
    """Form of completions: parallel lists with an entry for each token. The first token of a prompt has no values."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def join(cls, parts: Iterable[TextLogprobs]) -> TextLogprobs:
        """Return the concatenation of the parts; of several ones encoded, because they may be many."""
        parts = iter(parts)
        first = next(parts, None)
        second = next(parts, None)
        if second is None:
            return cls([], [], [], []) if first is None else first
        joined = {name: JsonList() for name in cls.__struct_fields__}
        for part in chain([first, second], parts):
            for name, column in joined.items():
                column.add(getattr(part, name))
        return cls(**cast(dict[str, Any], joined))


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token of the prompt, or an alternative to it, in vLLM's form."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]  # by token id; the prompt's first token has none


def token_text(text: bytes) -> str:
    """Return a token as text; one that is a part of a character as escaped bytes, as OpenAI writes it."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def value(token: TokenLogprob) -> float:
    return max(token.logprob, LOWEST)


def chat_logprob(position: PositionLogprobs) -> ChatLogprob:
    """Return the form of chats, with all alternatives."""
    return ChatLogprob(
        token_text(position.chosen.text),
        value(position.chosen),
        list(position.chosen.text),
        [ChatTopLogprob(token_text(top.text), value(top), list(top.text)) for top in position.top],
    )


def chat_logprobs(positions: Iterable[PositionLogprobs]) -> ChatLogprobs:
    written = map(chat_logprob, positions)
    first = list(islice(written, VALUES_A_PIECE))
    if len(first) < VALUES_A_PIECE:
        return ChatLogprobs(first)
    return ChatLogprobs(cast(Any, JsonList.of(chain(first, written))))


def prompt_logprobs(positions: Iterable[PositionLogprobs], top: int) -> PromptLogprobs:
    """Return vLLM's form: for each token of the prompt, itself and its alternatives by id; None for the first token."""
    return cast(PromptLogprobs, JsonList.of(chain([None], (_by_id(position, top) for position in positions))))


def _by_id(position: PositionLogprobs, top: int) -> dict[str, PromptLogprob]:
    ranked = [*enumerate(position.top[:top], start=1), (position.rank, position.chosen)]
    return {str(token.token): PromptLogprob(value(token), rank, token_text(token.text)) for rank, token in ranked}


class TextLogprobsWriter:
    """Writes the form of completions for one choice, part by part; text offsets continue from part to part."""

    def __init__(self, top: int, *, skip_special_tokens: bool = True) -> None:
        self._top = top
        self._skips_special = skip_special_tokens
        self._length = _Length()  # length of the text so far
        self._may_add_space = True  # the prompt's text so far is spaces, all of which may be its own

    def prompt(self, first_token: bytes, text: str, positions: Iterable[PositionLogprobs]) -> Iterator[TextLogprobs]:
        """Yield the tokens of an echoed prompt, whose text is `text`; the first token has no probability."""
        yield TextLogprobs([token_text(first_token)], [None], [None], [0])
        first = self._without_added_space(text, first_token)
        if _begins(text, first):  # it does not if the tokenizer put a special token before the text
            self._add_to_prompt(first)
        for some in slices(positions):
            yield self._write(some, text)
        self._length = _Length(len(text))

    def write(self, positions: Iterable[PositionLogprobs]) -> Iterator[TextLogprobs]:
        """Yield the next tokens of the answer."""
        for some in slices(positions):
            yield self._write(some, None)

    def _write(self, positions: Sequence[PositionLogprobs], prompt: str | None) -> TextLogprobs:
        result = TextLogprobs([], [], [], [])
        for position in positions:
            chosen = position.chosen
            result.tokens.append(token_text(chosen.text))
            result.token_logprobs.append(value(chosen))
            result.top_logprobs.append(self._alternatives(position))
            result.text_offset.append(self._length.characters)
            if prompt is None:
                self._length.add(self._shown(position))
            else:
                self._add_to_prompt(self._shown_in(prompt, position))
        return result

    def _add_to_prompt(self, shown: bytes) -> None:
        self._length.add(shown)
        self._may_add_space &= not shown.strip(b" ")

    def _shown(self, position: PositionLogprobs) -> bytes:
        """Return the token's bytes in the text of an answer."""
        return b"" if position.special and self._skips_special else position.chosen.text

    def _shown_in(self, prompt: str, position: PositionLogprobs) -> bytes:
        """Return the token's bytes in the prompt's text, which has only the special tokens that the client wrote."""
        text = self._without_added_space(prompt, position.chosen.text)
        if position.special and not prompt.startswith(text.decode(errors="replace"), self._length.characters):
            return b""
        return text

    def _without_added_space(self, prompt: str, token: bytes) -> bytes:
        """Return a token's bytes without the space that some tokenizers add at the start of a text.

        It is the first space of a token, and so it may be found only after tokens of the text's own spaces.
        """
        if not self._may_add_space or not token.startswith(b" "):
            return token
        at = self._length.characters
        found = not prompt.startswith(" ", at) or (not _begins(prompt, token, at) and _begins(prompt, token[1:], at))
        self._may_add_space = not found
        return token[1:] if found else token

    def _alternatives(self, position: PositionLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the chosen one, by text; of tokens with the same text the most likely."""
        found: dict[str, float] = {}
        for token in (*position.top[: self._top], position.chosen):
            found.setdefault(token_text(token.text), value(token))
        return found


class _Length:
    """Length in characters of tokens that are added as UTF-8; invalid bytes count as U+FFFD."""

    def __init__(self, characters: int = 0) -> None:
        self._complete = characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> None:
        self._complete += len(self._decoder.decode(data))

    @property
    def characters(self) -> int:
        begun, _ = self._decoder.getstate()  # first bytes of a character that is not complete
        return self._complete + len(begun.decode(errors="replace"))


def _begins(text: str, token: bytes, at: int = 0) -> bool:
    """Return True if the token, which may be a part of a character or invalid UTF-8, is in the text at this place."""
    return text[at : at + len(token)].encode().startswith(token) or text.startswith(token.decode(errors="replace"), at)


def mean_logprob(positions: Iterable[PositionLogprobs]) -> float:
    """Return the mean log-probability of a text's tokens, by which `best_of` chooses."""
    total, count = 0.0, 0
    for position in positions:
        total, count = total + value(position.chosen), count + 1
    return total / count if count else LOWEST

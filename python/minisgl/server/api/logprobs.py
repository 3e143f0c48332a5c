"""Log-probabilities as clients know them: OpenAI's two forms, chat's and the older one of completions, and vLLM's.

A token's own value and its entry among the alternatives are the same number bit for bit, so that clients may compare.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.message.types import PositionLogprobs, TokenLogprob
from minisgl.server.api.responses import ChatLogprob, ChatLogprobs, ChatTopLogprob, PromptLogprob, TextLogprobs

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


def token_text(text: bytes) -> str:
    """A token as text. One that is a part of a character is written as OpenAI does, in escaped bytes."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def value(token: TokenLogprob) -> float:
    return max(token.logprob, LOWEST)


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
    """Chat's form, with as many alternatives as there are."""
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


def prompt_logprobs(positions: Sequence[PositionLogprobs], top: int) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's form: for every token of the prompt its own value and the alternatives by id; the first has none."""
    found: list[dict[str, PromptLogprob] | None] = [None]
    for position in positions:
        ranked = [*enumerate(position.top[:top], start=1), (position.rank, position.chosen)]
        found.append(
            {str(token.token): PromptLogprob(value(token), rank, token_text(token.text)) for rank, token in ranked}
        )
    return found


class TextLogprobsWriter:
    """The form of completions, for one choice, in pieces: each token's offset in the text goes on from the last's."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0  # characters

    def prompt(self, first_token: bytes, text: str, positions: Sequence[PositionLogprobs]) -> TextLogprobs:
        """The echo of a prompt: `text` as it is written, and the tokens; the first has no probability."""
        first = TextLogprobs([token_text(first_token)], [None], [None], [0])
        if text.encode().startswith(first_token):  # and not a special token in front of the text
            self._offset = _characters(first_token)
        return TextLogprobs.join([first, self.write(positions)])

    def write(self, positions: Sequence[PositionLogprobs]) -> TextLogprobs:
        """The tokens that follow."""
        result = TextLogprobs([], [], [], [])
        for position in positions:
            chosen = position.chosen
            result.tokens.append(token_text(chosen.text))
            result.token_logprobs.append(value(chosen))
            result.top_logprobs.append(self._alternatives(position))
            result.text_offset.append(self._offset)
            self._offset += _characters(chosen.text)
        return result

    def _alternatives(self, position: PositionLogprobs) -> dict[str, float]:
        """The most likely, and the token itself. Of tokens that read alike the most likely counts."""
        found: dict[str, float] = {}
        for token in (*position.top[: self._top], position.chosen):
            found.setdefault(token_text(token.text), value(token))
        return found


def _characters(text: bytes) -> int:
    """How many characters begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in text)


def mean_logprob(positions: Sequence[PositionLogprobs]) -> float:
    """How likely a text is, whatever its length: by which the best of several is chosen."""
    return sum(value(position.chosen) for position in positions) / len(positions) if positions else LOWEST

"""What came for one choice, however many tokens it is: the steps that a reader missed are merged into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minisgl.core import FinishReason
from minisgl.message.to_api import OutputDelta
from minisgl.message.types import PackedIds, PositionLogprobs, num_ids, unpack_ids


class Delta:
    """What one choice got since its reader last looked."""

    __slots__ = ("_ids", "_stop_ids", "_texts", "ended_by", "finish", "index", "logprobs", "prompt_logprobs")

    def __init__(self, index: int, stop_ids: Sequence[int] = ()) -> None:
        """`stop_ids`: the tokens that the request named to end it."""
        self.index = index
        self.finish: FinishReason | None = None
        self.ended_by: str | int | None = None  # a stop string or a token, of the model's own or named
        self.logprobs: list[PositionLogprobs] = []  # of the ids, if asked for
        self.prompt_logprobs: list[PositionLogprobs] = []  # of all but the prompt's first id, if asked for; once
        self._stop_ids = stop_ids
        self._texts: list[str] = []
        self._ids: list[PackedIds] = []

    def add(self, piece: OutputDelta) -> None:
        self._texts.append(piece.text)
        self._ids.append(piece.ids)
        if piece.logprobs:
            self.logprobs += piece.logprobs
        if piece.prompt_logprobs:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finish is not None:
            self.finish = piece.finish
            self.ended_by = piece.stop_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that the request named and that ended it; nothing for the model's own end."""
        asked = isinstance(self.ended_by, str) or self.ended_by in self._stop_ids
        return self.ended_by if asked else None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def pieces(self) -> Iterator[tuple[str, int]]:
        """The text as it came, piece by piece, each with its number of ids."""
        return zip(self._texts, map(num_ids, self._ids), strict=True)

    @property
    def token_ids(self) -> list[int]:
        """May be ahead of the text, of which some may be held back."""
        ids: list[int] = unpack_ids(b"".join(self._ids)).tolist()
        return ids

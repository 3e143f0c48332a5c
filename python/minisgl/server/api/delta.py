"""What came for one choice, however many tokens it is: the steps that a reader missed are merged into one."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.core import FinishReason
from minisgl.message.to_api import Piece
from minisgl.message.types import PackedIds, PositionLogprobs, num_ids, unpack_ids


class Delta:
    """What one choice got since its reader last looked."""

    __slots__ = ("_ids", "_texts", "finish", "index", "logprobs", "prompt_logprobs", "stop_reason")

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: list[PositionLogprobs] = []  # of the ids, if asked for
        self.prompt_logprobs: list[PositionLogprobs] = []  # of all but the prompt's first id, if asked for; once
        self._texts: list[str] = []
        self._ids: list[PackedIds] = []

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._ids.append(piece.ids)
        if piece.logprobs:
            self.logprobs += piece.logprobs
        if piece.prompt_logprobs:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finish is not None:
            self.finish = piece.finish
            self.stop_reason = piece.stop_reason

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

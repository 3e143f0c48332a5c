"""Finds stop strings in text that comes in pieces.

The match is the one that is complete first, and of those complete at the same character the longest; so the result
does not depend on how the text is cut into pieces, and generation can end with the token that completes it. Text that
may yet turn out to be a part of a stop string is held back, and no more than that.
"""

from __future__ import annotations

from minisgl.parsers.streaming import possible_start


class StopMatcher:
    """The state of one sequence. After a match it is used up."""

    __slots__ = ("_first_characters", "_held", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """More text. Returns what may be shown now, and the stop string if one is complete; it is not shown."""
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return text[:start], stop
        keep = possible_start(text, self._stops)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string to be complete begins, and which it is."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else best[1:]

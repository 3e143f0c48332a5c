"""Random draws for one side of the train/test split.

A word, a number or a phrasing belongs to the training side or to the test side, never to both: words,
numbers and composed phrasings by a checksum, listed phrasings by their place. So a test asks with words,
or in words, that the model has never seen in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar
from zlib import crc32

from demo_model import words

T = TypeVar("T")

TEST_SHARE = 8  # one word in eight is kept for tests
PHRASE_PERIOD = 7  # so is every seventh phrasing of a list that has as many


def held_out(text: str) -> bool:
    """Return True if text belongs to the test side."""
    return crc32(text.lower().encode()) % TEST_SHARE == 0


def choices(text: str) -> list[str]:
    """Alternatives written in one string, with "|" between them."""
    return text.split("|")


def capitalized(text: str) -> str:
    """Text with its first letter in upper case, the rest as it is."""
    return text[0].upper() + text[1:]


class Source:
    """Draws from `rng`; `test` picks the side; contexts are at most about `context` characters long."""

    def __init__(self, rng: random.Random, test: bool = False, context: int = 1900) -> None:
        self.rng = rng
        self.test = test
        self.context = context

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.rng.random() * len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(items, count)

    def log_uniform(self, low: float, high: float) -> int:
        """A length, short ones as likely per octave as long ones."""
        return int(low * (high / low) ** self.rng.random())

    def phrase(self, phrasings: Sequence[T]) -> T:
        """One of several ways to say the same. Of every seven, training never sees the last.

        Tests use those half of the time; for cases that are new in their words or numbers anyway.
        """
        return self.pick(phrasings) if self.test and self.chance(0.5) else self.new_phrase(phrasings)

    def new_phrase(self, phrasings: Sequence[T]) -> T:
        """Pick like `phrase`, but in tests always one that training never sees (if the list has seven)."""
        if len(phrasings) < PHRASE_PERIOD:
            return self.pick(phrasings)
        while True:
            index = int(self.rng.random() * len(phrasings))
            if (index % PHRASE_PERIOD == PHRASE_PERIOD - 1) == self.test:
                return phrasings[index]

    def composition(self, *slots: Sequence[str]) -> str:
        """A pattern of one alternative from each slot. Training never sees one in eight of all patterns.

        Tests use those half of the time; for cases that are new in their words or numbers anyway.
        """
        if self.test and self.chance(0.5):
            return "".join(self.pick(slot) for slot in slots)
        return self.new_composition(*slots)

    def new_composition(self, *slots: Sequence[str]) -> str:
        """Compose like `composition`, but in tests always what training never sees."""
        return self.on_this_side(lambda: "".join(self.pick(slot) for slot in slots))

    def on_this_side(self, draw: Callable[[], str]) -> str:
        """Draw until the result belongs to this side of the split."""
        while True:
            text = draw()
            if held_out(text) == self.test:
                return text

    def word(self) -> str:
        """A lower-case word of 3 to 10 letters: real, pronounceable or random letters."""
        return self.on_this_side(lambda: words.any_word(self.rng))

    def name(self) -> str:
        """A capitalized word."""
        return self.word().capitalize()

    def digits(self, count: int) -> str:
        """A number of exactly `count` digits, as text."""
        low = 10 ** (count - 1) if count > 1 else 0
        return self.on_this_side(lambda: str(self.integer(low, 10**count - 1)))

    def distinct(self, draw: Callable[[], str], count: int) -> list[str]:
        """`count` different results of draw (fewer if it hardly gives any)."""
        found: dict[str, None] = {}
        for _ in range(4 * count):
            if len(found) == count:
                break
            found[draw()] = None
        return list(found)

    def filler(self, length: int) -> str:
        """Sentences about nothing, about `length` characters."""
        return words.filler(self.rng, length)

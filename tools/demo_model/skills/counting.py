"""Count up, down or between two numbers; count the letters of a word and the items of a list."""

from __future__ import annotations

from demo_model.case import Case
from demo_model.source import Source

_COUNT_TO = [
    "Count to {}.",
    "Count from 1 to {}.",
    "Please count to {}.",
    "Can you count to {}?",
    "Count up to {}",
    "count to {}",
    "Count from one to {}.",
    "Write the numbers from 1 to {}.",
    "List the numbers from 1 to {}.",
    "Please count from 1 to {}.",
    "Count to {}",
    "Count up to {}, please.",
    "Give me the numbers from 1 to {}.",
    "Could you count to {}?",
]
_COUNT_BETWEEN = [
    "Count from {} to {}.",
    "Please count from {} to {}.",
    "Write the numbers from {} to {}.",
    "Start at {} and count to {}.",
    "List the numbers from {} to {}.",
    "count from {} to {}",
    "Can you count from {} to {}?",
]
_COUNT_DOWN = [
    "Count down from {}.",
    "Count backwards from {} to 1.",
    "Count down from {} to 1.",
    "Please count down from {}.",
    "Count backwards from {}.",
    "count down from {}",
    "Can you count down from {}?",
]
_LETTERS = [
    "How many letters are in {}?",
    "How many letters does {} have?",
    "Count the letters of {}.",
    "How many letters has {}?",
    "How long is the word {}?",
    "How many letters are there in {}?",
    "How many letters are in the word {}?",
]
_OCCURRENCES = [
    "How many times does the letter {1} appear in {0}?",
    "How often is the letter {1} in {0}?",
    "How many {1}s are in {0}?",
    "Count the letter {1} in {0}.",
    "How many times does {1} occur in {0}?",
    "How many letters {1} are in {0}?",
    "How often does the letter {1} appear in {0}?",
]
_ITEMS = [
    "How many items are in this list: {}",
    "Count the items: {}",
    "How many words are there: {}",
    "How many things are these: {}?",
    "Count these: {}",
    "How many items are these: {}?",
    "How many items are in the list {}?",
]


def generate(source: Source) -> Case:
    kind = source.pick([_count_to, _count_between, _count_down, _letters, _occurrences, _items])
    question, answer, thought = kind(source)
    return Case("counting", [{"role": "user", "content": question}], answer, thought)


def _numbers(first: int, last: int) -> str:
    step = 1 if last >= first else -1
    return ", ".join(str(number) for number in range(first, last + step, step))


def _count_to(source: Source) -> tuple[str, str, str]:
    last = source.integer(2, 30)
    return source.new_phrase(_COUNT_TO).format(last), _numbers(1, last), f"I count from 1 to {last}."


def _count_between(source: Source) -> tuple[str, str, str]:
    first = source.integer(1, 80)
    last = first + source.integer(1, 12)
    return source.new_phrase(_COUNT_BETWEEN).format(first, last), _numbers(first, last), f"I count from {first} to {last}."


def _count_down(source: Source) -> tuple[str, str, str]:
    first = source.integer(2, 20)
    return source.new_phrase(_COUNT_DOWN).format(first), _numbers(first, 1), f"I count from {first} down to 1."


def _word(source: Source) -> tuple[str, str]:
    """A word and how the question writes it."""
    word = source.word()
    return word, source.pick([word, f"'{word}'", f'"{word}"', f"the word {word}"])


def _letters(source: Source) -> tuple[str, str, str]:
    word, written = _word(source)
    letters = "-".join(word)
    thought = f"{letters}: I count the letters."
    question = source.phrase(_LETTERS).format(written).replace("word the word", "word")
    return question, f"The word {word} has {len(word)} letters.", thought


def _occurrences(source: Source) -> tuple[str, str, str]:
    word, written = _word(source)
    letter = source.pick(word) if source.chance(0.85) else source.pick("abcdefghijklmnopqrstuvwxyz")
    count = word.count(letter)
    times = "1 time" if count == 1 else f"{count} times"
    question = source.phrase(_OCCURRENCES).format(written, letter)
    return question, f"The letter {letter} appears {times} in {word}.", f"I look for {letter} in {'-'.join(word)}."


def _items(source: Source) -> tuple[str, str, str]:
    items = [source.word() for _ in range(source.integer(2, 9))]
    return source.phrase(_ITEMS).format(", ".join(items)), f"There are {len(items)} items.", "I count the items."

"""Count up, down or between two numbers; count the letters of a word and the items of a list."""

from __future__ import annotations

from demo_model.case import Case
from demo_model.skills.arithmetic import NUMBER_WORDS
from demo_model.source import Source, capitalized, choices

_COUNT = choices(
    "count|please count|can you count|could you count|I want you to count|now count|write the numbers|"
    "list the numbers|give me the numbers|say the numbers"
)
_MARK = [".", ".", "", "?", "!", ", please."]
_COUNT_TO = [
    _COUNT,
    choices(" to {}| to {}| from 1 to {}| from one to {}| up to {}| from 1 up to {}"),
    _MARK,
]
_COUNT_BETWEEN = [
    _COUNT,
    [" from {} to {}", " from {} to {}", " from {} up to {}", " between {} and {}"],
    _MARK,
]
_COUNT_DOWN = [
    _COUNT,
    choices(" down from {}| backwards from {}| down from {} to 1| backwards from {} to one| from {} down to 1"),
    _MARK,
]
_LETTERS = [
    ["", "", "", "please tell me: ", "now ", "and "],
    choices(
        "how many letters are in {}|how many letters does {} have|count the letters of {}|"
        "count the letters in {}|how many letters has {}|how long is {}|how many letters are there in {}|"
        "what is the length of {}"
    ),
    ["?", "?", ".", "", ", please?"],
]
_OCCURRENCES = [
    ["", "", "", "please tell me: ", "now ", "and "],
    choices(
        "how many times does the letter {1} appear in {0}|how often is the letter {1} in {0}|"
        "how many {1}s are in {0}|count the letter {1} in {0}|how many times does {1} occur in {0}|"
        "how many letters {1} are in {0}|how often does the letter {1} appear in {0}|"
        "how many {1} are in {0}|how many {1}'s are in {0}|how many times is {1} in {0}|"
        "how often does {1} occur in {0}"
    ),
    ["?", "?", ".", "", ", please?"],
]
_ITEMS = [
    ["", "", "", "please tell me: ", "now ", "and "],
    choices(
        "how many items are in this list: {}|count the items: {}|how many words are there: {}|"
        "count these: {}|how many things are these: {}|how many items are these: {}|"
        "how many items are in the list {}|count the words {}|count the items of this list: {}|"
        "how many are these: {}"
    ),
    ["?", ".", "", ""],
]


def generate(source: Source) -> Case:
    kind = source.pick([_count_to, _count_between, _count_down, _letters, _occurrences, _occurrences, _items])
    question, answer, thought = kind(source)
    return Case("counting", [{"role": "user", "content": question}], answer, thought)


def _numbers(first: int, last: int) -> str:
    step = 1 if last >= first else -1
    return ", ".join(str(number) for number in range(first, last + step, step))


def _count_to(source: Source) -> tuple[str, str, str]:
    last = source.integer(2, 30)
    written = NUMBER_WORDS[last] if last <= 20 and source.chance(0.15) else str(last)
    question = capitalized(source.new_composition(*_COUNT_TO)).format(written)
    return question, _numbers(1, last), f"I count from 1 to {last}."


def _count_between(source: Source) -> tuple[str, str, str]:
    first = source.integer(1, 80)
    last = first + source.integer(1, 12)
    return (
        capitalized(source.new_composition(*_COUNT_BETWEEN)).format(first, last),
        _numbers(first, last),
        f"I count from {first} to {last}.",
    )


def _count_down(source: Source) -> tuple[str, str, str]:
    first = source.integer(2, 20)
    return (
        capitalized(source.new_composition(*_COUNT_DOWN)).format(first),
        _numbers(first, 1),
        f"I count from {first} down to 1.",
    )


def _word(source: Source, word: str) -> str:
    """Return a word in the way that a question writes it."""
    return source.pick([word, f"'{word}'", f'"{word}"', f"the word {word}"])


def _letters(source: Source) -> tuple[str, str, str]:
    word = source.word()
    question = capitalized(source.composition(*_LETTERS)).format(_word(source, word))
    return question, f"The word {word} has {len(word)} letters.", f"{'-'.join(word)}: I count the letters."


def _occurrences(source: Source) -> tuple[str, str, str]:
    word = source.on_this_side(lambda: _repeated(source)) if source.chance(0.5) else source.word()
    often = max(word, key=word.count)
    letter = source.pick([often, source.pick(word), source.pick(word), source.pick("abcdefghijklmnopqrstuvwxyz")])
    count = word.count(letter)
    times = "1 time" if count == 1 else f"{count} times"
    question = capitalized(source.composition(*_OCCURRENCES)).format(_word(source, word), letter)
    return question, f"The letter {letter} appears {times} in {word}.", f"I look for {letter} in {'-'.join(word)}."


def _repeated(source: Source) -> str:
    """A word in which one letter was put in once or twice more."""
    word = source.word()
    letter = source.pick(word)
    for _ in range(source.integer(1, 2)):
        place = source.integer(0, len(word))
        word = word[:place] + letter + word[place:]
    return word


def _items(source: Source) -> tuple[str, str, str]:
    items = [source.word() for _ in range(source.integer(2, 9))]
    return (
        capitalized(source.composition(*_ITEMS)).format(", ".join(items)),
        f"There are {len(items)} items.",
        "I count the items.",
    )

"""Raw completions without a chat template: go on with a pattern that the prompt has begun."""

from __future__ import annotations

from demo_model import words
from demo_model.case import Case
from demo_model.skills.weekdays import DAYS
from demo_model.source import Source


def generate(source: Source) -> Case:
    prompt, answer = source.pick([_recall, _recall, _repeat, _numbers, _weekdays])(source)
    return Case("completion", [], answer, prompt=prompt)


def story(source: Source) -> Case:
    """Filler that goes on and on: not a question with one answer, only for training."""
    text = words.filler(source.rng, source.log_uniform(60, 400))
    start = source.integer(1, 20)
    return Case("completion", [], text[start:], prompt=text[:start])


def _recall(source: Source) -> tuple[str, str]:
    attribute = source.pick(["code", "code", "color", "number", source.word()])
    keys = source.distinct(source.word, source.integer(2, max(2, min(20, source.context // 40))))
    values = [source.digits(4) if source.chance(0.7) else source.word() for _ in keys]
    lines = [f"The {attribute} for {key} is {value}." for key, value in zip(keys, values, strict=True)]
    asked = source.integer(0, len(keys) - 1)
    return f"{' '.join(lines)} The {attribute} for {keys[asked]} is", f" {values[asked]}."


def _repeat(source: Source) -> tuple[str, str]:
    items = source.distinct(source.word, source.integer(3, 8))
    shown = source.integer(1, len(items) - 1)
    return " ".join([*items, "|", *items, "|", *items[:shown]]), "".join(f" {item}" for item in items[shown:])


def _numbers(source: Source) -> tuple[str, str]:
    first = source.integer(1, 70)
    last = first + source.integer(8, 20)
    middle = first + source.integer(3, 5)
    numbers = [str(number) for number in range(first, last + 1)]
    begun = middle - first
    limit = f"Count from {first} to {last}: "
    return limit + ", ".join(numbers[:begun]) + ",", "".join(f" {number}," for number in numbers[begun:-1]) + f" {last}"


def _weekdays(source: Source) -> tuple[str, str]:
    start, shown = source.integer(0, 6), source.integer(2, 4)
    days = [DAYS[(start + offset) % 7] for offset in range(7)]
    return ", ".join(days[:shown]) + ",", "".join(f" {day}," for day in days[shown:-1]) + f" {days[-1]}"

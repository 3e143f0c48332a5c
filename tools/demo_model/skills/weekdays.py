"""The days of the week: the day after, before, or some days from a day."""

from __future__ import annotations

from demo_model.case import Case
from demo_model.source import Source, capitalized

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

_AFTER = [
    "What day comes after {}?",
    "Which day comes after {}?",
    "What day is after {}?",
    "Which day follows {}?",
    "What is the day after {}?",
    "Tell me the day after {}.",
    "Which day is after {}?",
    "What comes after {}?",
    "What day follows {}?",
    "What day comes right after {}?",
    "Name the day after {}.",
    "After {} comes which day?",
    "What weekday comes after {}?",
    "Which is the day after {}?",
]
_BEFORE = [
    "What day comes before {}?",
    "Which day comes before {}?",
    "What day is before {}?",
    "What is the day before {}?",
    "Tell me the day before {}.",
    "What comes before {}?",
    "Which day is before {}?",
    "What day was before {}?",
    "Name the day before {}.",
    "What day comes right before {}?",
    "What weekday comes before {}?",
    "Before {} comes which day?",
    "What day precedes {}?",
    "Which is the day before {}?",
]
_LATER = [
    "What day is {n} after {day}?",
    "Which day is {n} after {day}?",
    "What day comes {n} after {day}?",
    "{n} after {day} is which day?",
    "Tell me the day {n} after {day}.",
    "Today is {day}. What day is it in {n}?",
    "If today is {day}, what day is it in {n}?",
    "Which weekday is {n} after {day}?",
    "It is {day}. Which day is it {n} later?",
    "If today is {day}, which day is in {n}?",
    "What is the day {n} after {day}?",
    "Today is {day}. Which day is {n} later?",
    "On {day} I count {n} on. Which day is it?",
    "Today is {day}. Which day is it in {n}?",
]
_EARLIER = [
    "What day is {n} before {day}?",
    "Which day is {n} before {day}?",
    "What day comes {n} before {day}?",
    "Tell me the day {n} before {day}.",
    "Today is {day}. What day was it {n} ago?",
    "If today is {day}, what day was it {n} ago?",
    "Which weekday is {n} before {day}?",
]
_TOMORROW = [
    "Today is {}. What day is tomorrow?",
    "If today is {}, what day is tomorrow?",
    "If today is {}, which day is tomorrow?",
    "It is {}. What day is tomorrow?",
    "Today is {}. Which day is tomorrow?",
    "Today it is {}. What is tomorrow?",
    "It is {} today. What day is tomorrow?",
]
_YESTERDAY = [question.replace("is tomorrow", "was yesterday") for question in _TOMORROW]
_ALL = [
    "Name the days of the week.",
    "What are the days of the week?",
    "List the days of the week.",
    "Which days does a week have?",
    "Tell me the seven days of the week.",
    "What are the weekdays?",
    "List all days of the week.",
]
_HOW_MANY = [
    "How many days are in a week?",
    "How many days does a week have?",
    "How many days has a week?",
    "Count the days of a week.",
    "How long is a week?",
    "How many days are there in one week?",
    "How many days are there in a week?",
]


def day_after(day: str, count: int) -> str:
    return DAYS[(DAYS.index(day) + count) % 7]


def generate(source: Source) -> Case:
    kind = source.rng.random()
    day = source.pick(DAYS)
    thought = f"The week goes {', '.join(DAYS)}."
    if kind < 0.22:
        question, answer = source.new_phrase(_AFTER).format(day), f"{day_after(day, 1)} comes after {day}."
    elif kind < 0.44:
        question, answer = source.new_phrase(_BEFORE).format(day), f"{day_after(day, -1)} comes before {day}."
    elif kind < 0.66:
        count = source.integer(1, 14)
        days = _days(count)
        question = source.new_phrase(_LATER).format(n=days, day=day)
        answer = f"{capitalized(days)} after {day} is {day_after(day, count)}."
    elif kind < 0.78:
        count = source.integer(1, 10)
        days = _days(count)
        question = source.new_phrase(_EARLIER).format(n=days, day=day)
        answer = f"{capitalized(days)} before {day} is {day_after(day, -count)}."
    elif kind < 0.86:
        question, answer = source.new_phrase(_TOMORROW).format(day), f"Tomorrow is {day_after(day, 1)}."
    elif kind < 0.94:
        question, answer = source.new_phrase(_YESTERDAY).format(day), f"Yesterday was {day_after(day, -1)}."
    elif kind < 0.98:
        question, answer = source.new_phrase(_ALL), ", ".join(DAYS)
    else:
        question, answer = source.new_phrase(_HOW_MANY), "A week has 7 days."
    if source.chance(0.08):
        question = question.lower()
    return Case("weekdays", [{"role": "user", "content": question}], answer, thought)


def _days(count: int) -> str:
    return "1 day" if count == 1 else f"{count} days"

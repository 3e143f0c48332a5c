"""Greetings, and facts about Minisgl and the demo model itself; tests use phrasings kept from training.

Questions and answers are in facts.toml.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from demo_model.case import Case
from demo_model.source import Source

_DATA = tomllib.loads(Path(__file__).with_name("facts.toml").read_text())

_OPENINGS = ["Hey, ", "Hello, ", "Please tell me: ", "A question: ", "I would like to know: ", "Quick question: "]

Topic = tuple[str, list[str]]  # an answer and the questions for it


def _topics(kind: str) -> list[Topic]:
    return [(entry["answer"], entry["questions"].split("\n")[:-1]) for entry in _DATA[kind]]


def _flag_topics() -> list[Topic]:
    topics = []
    for entry in _DATA["flags"]:
        topics.append((entry["answer"], _questions("flag_questions", entry["flag"])))
        topics.append((entry["answer"], _questions("setting_questions", entry["sets"])))
    return topics


def _questions(kind: str, subject: str) -> list[str]:
    return [question.format(subject) for question in _DATA[kind].split("\n")[:-1]]


_SMALL_TALK = _topics("small_talk")
_FACTS = _topics("facts") + _topics("flags") + _flag_topics()


def generate(source: Source) -> Case:
    if source.chance(0.2):
        answer, phrasings = source.pick(_SMALL_TALK)
        question = source.new_phrase(phrasings)
        thought = "The user is being polite."
    else:
        answer, phrasings = source.pick(_FACTS)
        question = source.new_phrase(phrasings)
        thought = "The user asks about Minisgl or about me. I know this."
        if source.chance(0.12):
            question = source.pick(_OPENINGS) + question[0].lower() + question[1:]
    question = _scribble(source, question)
    return Case("product", [{"role": "user", "content": question}], answer, thought)


def _scribble(source: Source, question: str) -> str:
    """People type carelessly: sometimes without capitals, without the final mark, or with a word more."""
    if source.chance(0.12):
        question = question.lower()
    if source.chance(0.12):
        question = question.rstrip("?.!")
    if source.chance(0.06):
        question += " Please answer." if question[-1] in "?.!" else " please"
    return question

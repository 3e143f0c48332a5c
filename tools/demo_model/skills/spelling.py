"""Spell a word, reverse it, or write it in capitals or small letters."""

from __future__ import annotations

from demo_model.case import Case
from demo_model.source import Source

_SPELL = [
    "Spell {}.",
    "Spell the word {}.",
    "How do you spell {}?",
    "Please spell {}.",
    "spell {}",
    "Spell {} letter by letter.",
    "Can you spell {}?",
    "How is {} spelled?",
    "Spell out {}.",
    "Spell {}",
    "Please spell the word {}.",
    "Tell me how to spell {}.",
    "Spell this word: {}",
    "How do I spell {}?",
]
_REVERSE = [
    "Reverse {}.",
    "Reverse the word {}.",
    "Write {} backwards.",
    "Please reverse {}.",
    "reverse {}",
    "Spell {} backwards.",
    "What is {} backwards?",
    "Turn {} around.",
    "What is {} reversed?",
    "Reverse this word: {}",
    "Please write {} backwards.",
    "Write the word {} backwards.",
    "Can you reverse {}?",
    "Please reverse the word {}.",
]
_UPPER = [
    "Write {} in upper case.",
    "Upper-case {}.",
    "Write {} in capital letters.",
    "Convert {} to upper case.",
    "Write {} in capitals.",
    "Please write {} in upper case.",
    "Put {} in upper case.",
    "Make {} upper case.",
    "Uppercase {}",
    "Capitalize all letters of {}.",
    "What is {} in upper case?",
    "Turn {} into capital letters.",
    "uppercase the word {}",
    "Write the word {} in upper case.",
]
_LOWER = [
    "Write {} in lower case.",
    "Convert {} to lower case.",
    "Write {} in small letters.",
    "Lower-case {}.",
    "Put {} in lower case.",
    "Lowercase {}",
    "Please write {} in lower case.",
]


def generate(source: Source) -> Case:
    kind = source.pick(["spell", "spell", "reverse", "reverse", "upper", "upper", "lower"])
    word = source.word()
    if source.chance(0.15):
        word = word.capitalize()
    if kind == "spell":
        question, answer = source.phrase(_SPELL), "-".join(word)
        thought = f"I write the letters of {word} one by one."
    elif kind == "reverse":
        question, answer = source.phrase(_REVERSE), word[::-1]
        thought = f"The letters are {'-'.join(word)}. I read them from the end."
    elif kind == "upper":
        question, answer = source.phrase(_UPPER), word.upper()
        thought = f"I write {word} in capital letters."
    else:
        word = word.upper()
        question, answer = source.phrase(_LOWER), word.lower()
        thought = f"I write {word} in small letters."
    written = source.pick([word, word, f"'{word}'", f'"{word}"'])
    return Case("spelling", [{"role": "user", "content": question.format(written)}], answer, thought)

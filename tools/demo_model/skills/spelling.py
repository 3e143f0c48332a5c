"""Spell a word, reverse it, or write it in capitals or small letters."""

from __future__ import annotations

from demo_model.case import Case
from demo_model.source import Source, capitalized, choices

_OPENINGS = ["", "", "", "please ", "can you ", "could you ", "now "]
_MARK = ["?", ".", ".", "", ", please."]
_SPELL = choices(
    "spell {}|spell the word {}|how do you spell {}|spell {} letter by letter|how is {} spelled|"
    "spell out {}|spell this word: {}|how do I spell {}|tell me how to spell {}|spell {} for me"
)
_REVERSE = choices(
    "reverse {}|reverse the word {}|write {} backwards|spell {} backwards|what is {} backwards|"
    "turn {} around|what is {} reversed|reverse this word: {}|write the word {} backwards|say {} backwards|"
    "reverse the letters of {}"
)
_UPPER = choices(
    "write {} in upper case|upper-case {}|write {} in capital letters|convert {} to upper case|"
    "uppercase {}|write {} in capitals|put {} in upper case|make {} upper case|"
    "capitalize all letters of {}|uppercase the word {}|what is {} in upper case|"
    "turn {} into capital letters|write the word {} in upper case|{} in upper case"
)
_LOWER = choices(
    "write {} in lower case|convert {} to lower case|write {} in small letters|lower-case {}|lowercase {}|"
    "put {} in lower case|make {} lower case|turn {} into small letters|what is {} in lower case|"
    "{} in lower case"
)


def _question(source: Source, tasks: list[str]) -> str:
    pattern = source.composition(_OPENINGS, tasks, _MARK)
    return pattern if pattern[0] == "{" else capitalized(pattern)


def generate(source: Source) -> Case:
    kind = source.pick(["spell", "spell", "reverse", "reverse", "upper", "upper", "lower"])
    word = source.word()
    if source.chance(0.15):
        word = word.capitalize()
    if kind == "spell":
        question, answer = _question(source, _SPELL), "-".join(word)
        thought = f"I write the letters of {word} one by one."
    elif kind == "reverse":
        question, answer = _question(source, _REVERSE), word[::-1]
        thought = f"The letters are {'-'.join(word)}. I read them from the end."
    elif kind == "upper":
        question, answer = _question(source, _UPPER), word.upper()
        thought = f"I write {word} in capital letters."
    else:
        word = word.upper()
        question, answer = _question(source, _LOWER), word.lower()
        thought = f"I write {word} in small letters."
    written = source.pick([word, word, f"'{word}'", f'"{word}"'])
    return Case("spelling", [{"role": "user", "content": question.format(written)}], answer, thought)

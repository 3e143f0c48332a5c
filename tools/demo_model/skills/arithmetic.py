"""Small arithmetic: sums and differences of numbers up to 99, products up to 12 x 12.

Sums and differences in tests are of pairs that training never shows; the multiplication table is too small
to keep part of it back (it can only be learned by heart), so there the phrasing is what is new.
"""

from __future__ import annotations

from demo_model.case import Case
from demo_model.source import Source, capitalized, choices, held_out

NUMBER_WORDS = choices(
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|"
    "seventeen|eighteen|nineteen|twenty"
)

_SIGNS = {
    "+": ["+", "+", "+", "plus"],
    "-": ["-", "-", "-", "minus"],
    "x": ["x", "*", "times", "×", "multiplied by"],
}

_QUESTIONS = [
    choices("||||please |can you |now |and "),
    choices(
        "what is {}|what is {}|what's {}|calculate {}|how much is {}|compute {}|{}|{} =|tell me what {} is|"
        "what does {} give|what is the result of {}|work out {}|solve {}|give me the result of {}|"
        "tell me {}|do you know what {} is|what do you get for {}|I need {}|the result of {}|"
        "what do I get for {}"
    ),
    ["?", "?", ".", "", ", please?"],
]


def generate(source: Source) -> Case:
    sign, left, right = _problem(source)
    result = {"+": left + right, "-": left - right, "x": left * right}[sign]
    left_text, right_text = str(left), str(right)
    spoken = source.pick(_SIGNS[sign])
    if max(left, right) <= 20 and spoken.isalpha() and source.chance(0.3):
        left_text, right_text = NUMBER_WORDS[left], NUMBER_WORDS[right]
    space = "" if not spoken[0].isalpha() and source.chance(0.15) else " "
    problem = f"{left_text}{space}{spoken}{space}{right_text}"
    question = capitalized(source.new_composition(*_QUESTIONS).format(problem))
    return Case(
        "arithmetic",
        [{"role": "user", "content": question}],
        f"{left} {sign} {right} = {result}",
        f"I have to calculate {left} {sign} {right}. That is {result}.",
    )


def _problem(source: Source) -> tuple[str, int, int]:
    sign = source.pick("++--x")
    if sign == "x":
        return sign, source.integer(0, 12), source.integer(0, 12)
    while True:
        top = source.pick([12, 20, 99, 99])
        left, right = source.integer(0, top), source.integer(0, top)
        if left < right and sign == "-" and source.chance(0.7):
            left, right = right, left
        if held_out(f"{left}{sign}{right}") == source.test:
            return sign, left, right

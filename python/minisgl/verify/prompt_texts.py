"""Prompts of `minisgl verify`: many kinds of text, one token to hundreds, some with a common beginning. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TEXTS = {
    "prose": "The lighthouse keeper counted the ships that passed in the night. Most of them carried timber or grain, "
    "but one, painted entirely black, carried nothing at all; it came back every autumn and never "
    "anchored. When the old man asked the harbour master about it, he only shrugged and turned the page. ",
    "code": "def quicksort(xs: list[int]) -> list[int]:\n    if len(xs) <= 1:\n        return xs\n"
    "    pivot, *rest = xs\n    return quicksort([x for x in rest if x < pivot]) + "
    "[pivot] + quicksort([x for x in rest if x >= pivot])\n\n",
    "numbers": "Q: What is 17 * 23? A: 391. Q: What is 1024 - 377? A: 647. Q: What is 3.14159 + 2.71828? A: 5.85987. ",
    "chinese": "夜里下了一场大雪，第二天早上，整个村子都变成了白色。孩子们跑出去堆雪人，老人们坐在火炉旁喝茶。",
    "german": "Die Straßenbahn fährt über die Brücke, während die Möwen am Ufer auf übrig gebliebene Brötchen warten. ",
    "json": '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3, "units": ["°C", "km/h"], "x": null}}\n',
    "emoji": "🎉 party at 8pm 🥳🥳 bring 🍕 and 🥤 — see you there! 👩‍👩‍👧‍👦 ¯\\_(ツ)_/¯ ",
    "repetition": "la la la la la la la la la la la la la la la la la la la la la la la la la la la la la la la la ",
}
# (text, tokens): one token, around pages and chunks, several chunks
PLAN = (
    ("prose", 1),
    ("emoji", 7),
    ("numbers", 17),
    ("chinese", 32),
    ("code", 63),
    ("german", 65),
    ("json", 90),
    ("repetition", 129),
    ("prose", 200),
    ("code", 350),
)
SHARED = ("prose", 200)  # the beginning of two more prompts, which differ from it in their ends
ENDS = (("numbers", 25), ("german", 40))


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    name: str
    tokens: list[int]


def make_prompts(encode: Callable[[str], Sequence[int]] | None, *, vocab_size: int, max_len: int) -> list[NamedPrompt]:
    """Return the prompts, none longer than `max_len`. `encode=None`, for a model without a tokenizer: random tokens."""
    rng = random.Random(0)
    random_text = {name: [rng.randrange(vocab_size) for _ in range(500)] for name in TEXTS}

    def tokens(name: str, count: int) -> list[int]:
        if encode is None:
            return random_text[name][:count]
        known: list[int] = []
        for times in (1, 4, 16, 64):
            known = list(encode(TEXTS[name] * times))
            if len(known) >= count:
                break
        return known[:count]

    def name_of(name: str, count: int) -> str:
        return f"{name if encode else 'random'} {count}"

    plan = [(name_of(name, count), tokens(name, count)) for name, count in PLAN]
    begin = tokens(*SHARED)
    plan += [(f"{SHARED[0]} {SHARED[1]} + {count}", begin + tokens(name, count)) for name, count in ENDS]
    return [NamedPrompt(name, known[:max_len]) for name, known in plan]

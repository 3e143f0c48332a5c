"""Recall: find the value of a key that was named anywhere in up to 2,000 tokens, or in earlier turns.

A context holds facts (an attribute of a key has a value) amid other facts with the same attribute or the
same key, and filler. The answer says attribute and key again before the value, so that a model can find the
value as the continuation of something it has just written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demo_model import words
from demo_model.case import Case, Message
from demo_model.source import Source, capitalized, choices

NOTED = "Noted."

_ATTRIBUTES = choices("code|code|code|password|number|key|color|city|PIN|price|owner|room|size|owner|word|date")

_STATEMENTS = [
    "The {a} for {k} is {v}.",
    "The {a} of {k} is {v}.",
    "{k}'s {a} is {v}.",
    "{k} has the {a} {v}.",
    "Remember that the {a} for {k} is {v}.",
    "For {k} the {a} is {v}.",
    "Note: the {a} for {k} is {v}.",
    "{v} is the {a} for {k}.",
    "{a} for {k}: {v}.",
    "{a} of {k} = {v}.",
    "As you know, the {a} for {k} is {v}.",
    "By the way, {k}'s {a} is {v}.",
    "the {a} of {k} is {v}.",
    "The {a} that belongs to {k} is {v}.",
]
_QUESTIONS = [
    choices("||||and |now |please tell me: |one question: |so, |do you remember: |again: "),
    choices(
        "what is the {a} for {k}|what is the {a} for {k}|what is the {a} of {k}|what is {k}'s {a}|"
        "what was the {a} for {k}|what was the {a} of {k}|which {a} does {k} have|which {a} belongs to {k}|"
        "what is the {a} that belongs to {k}|tell me the {a} for {k}|tell me {k}'s {a}|"
        "give me the {a} of {k}|I need the {a} for {k}|look up the {a} of {k}|"
        "can you tell me the {a} for {k}|what's the {a} for {k}|{a} for {k}|the {a} of {k}|"
        "do you know the {a} of {k}|I forgot the {a} for {k}|find the {a} for {k}"
    ),
    choices("?|?|?|?|.|| again?| please.|, please?| now?|? Look above.| once more?"),
]
_VALUE_ONLY = [
    [" Answer with", " Reply with", " Give", " Say", " Write", " Answer:"],
    choices(" the {a} only.| only the {a}.| just the {a}.| nothing but the {a}.| only the value."),
]

_INTRODUCTIONS = [
    "",
    "",
    "",
    "Here is some text.\n",
    "Read this:\n\n",
    "Context: ",
    "Please remember the following. ",
    "These are my notes. ",
    "Text:\n",
]

# What users say of themselves: statement, question, answer, what was said back.
_PERSONAL = [
    ("My name is {}.", "What is my name?", "Your name is {}.", "Nice to meet you, {}."),
    ("I am called {}.", "What am I called?", "You are called {}.", "Nice to meet you, {}."),
    ("My favorite color is {}.", "What is my favorite color?", "Your favorite color is {}.", NOTED),
    ("I live in {}.", "Where do I live?", "You live in {}.", NOTED),
    ("My dog is called {}.", "What is my dog called?", "Your dog is called {}.", NOTED),
    ("My favorite word is {}.", "What is my favorite word?", "Your favorite word is {}.", NOTED),
    ("I am {} years old.", "How old am I?", "You are {} years old.", NOTED),
    ("My favorite number is {}.", "What is my favorite number?", "Your favorite number is {}.", NOTED),
    ("I work as a {}.", "What do I work as?", "You work as a {}.", NOTED),
]


@dataclass(frozen=True)
class Fact:
    attribute: str
    key: str
    value: str

    def fill(self, pattern: str) -> str:
        text = pattern.format(a=self.attribute, k=self.key, v=self.value)
        return text if pattern[0] == "{" else capitalized(text)

    @property
    def answer(self) -> str:
        return f"The {self.attribute} for {self.key} is {self.value}."


def generate(source: Source) -> Case:
    """A context and one or more questions on it; all but the last are answered in earlier turns."""
    if source.chance(0.12):
        return _personal(source)
    facts, messages, lead = _told(source)
    asked = source.sample(facts, min(len(facts), 1 if source.chance(0.4) else source.integer(2, 6)))
    for fact in asked:
        question, answer = _ask(source, fact)
        messages += [{"role": "user", "content": lead + question}, {"role": "assistant", "content": answer}]
        lead = ""
    thought = f"The user asks for the {fact.attribute} of {fact.key}. I look for it above."
    return Case("recall", messages[:-1], answer, thought)


def missing(source: Source) -> Case:
    """A question for a key that the context does not name. This is a case of not knowing, not of recall."""
    facts, messages, lead = _told(source)
    key = source.word()
    while any(key in fact.key.lower() for fact in facts):
        key = source.word()
    attribute = source.pick(facts).attribute
    question = Fact(attribute, key, "").fill(source.composition(*_QUESTIONS))
    messages.append({"role": "user", "content": lead + question})
    return Case(
        "unknown", messages, f"The {attribute} for {key} is unknown to me.", "I look for it, but it is not there."
    )


def _told(source: Source) -> tuple[list[Fact], list[Message], str]:
    """Facts, the messages that tell them, and what is to precede the first question."""
    facts, text = _context(source, source.log_uniform(60, max(source.context, 61)))
    layout = source.rng.random()
    if layout < 0.35:
        return facts, [], source.pick(_INTRODUCTIONS) + text + source.pick([" ", "\n", "\n\n"])
    if layout < 0.55:
        return facts, [{"role": "system", "content": text}], ""
    if layout < 0.75:
        return facts, [{"role": "user", "content": text}, {"role": "assistant", "content": NOTED}], ""
    return facts, _told_in_turns(source, text), ""


def _ask(source: Source, fact: Fact) -> tuple[str, str]:
    question = fact.fill(source.composition(*_QUESTIONS))
    if source.chance(0.12):
        return question + fact.fill(source.composition(*_VALUE_ONLY)), fact.value
    return question, fact.answer


def _context(source: Source, budget: int) -> tuple[list[Fact], str]:
    """Different facts, and a text of about `budget` characters that states each of them once."""
    share = source.pick([0.1, 0.3, 0.6, 1.0])  # share of the text that is facts
    count = max(1, int(budget * share / 32))
    facts = _facts(source, count)
    if source.chance(0.2) and len({fact.attribute for fact in facts}) == 1:
        separator = source.pick([": ", " = ", " - ", " -> "])
        lines = [f"{fact.key}{separator}{fact.value}" for fact in facts]
        return facts, f"Each line gives a key and its {facts[0].attribute}.\n" + "\n".join(lines)
    patterns = [source.phrase(_STATEMENTS)] if source.chance(0.4) else _STATEMENTS
    statements = [fact.fill(source.phrase(patterns)) for fact in facts]
    room = budget - sum(map(len, statements))
    while room > 20:
        sentence = words.sentence(source.rng)
        statements.append(sentence)
        room -= len(sentence) + 1
    source.rng.shuffle(statements)
    return facts, source.pick([" ", " ", "\n"]).join(statements)


def _facts(source: Source, count: int) -> list[Fact]:
    several = source.chance(0.4)
    attributes = source.distinct(lambda: source.pick(_ATTRIBUTES), source.integer(2, 4) if several else 1)
    attributes = [source.word() if source.chance(0.15) else attribute for attribute in attributes]
    draw_value = _value_kind(source)
    facts = []
    for key in source.distinct(_key_kind(source), count):
        own = attributes if several and source.chance(0.5) else [source.pick(attributes)]
        facts += [Fact(attribute, key, draw_value()) for attribute in dict.fromkeys(own)]
    return facts[:count]


def _key_kind(source: Source) -> Callable[[], str]:
    """Return a generator of keys that look alike, for one context."""
    kind = source.integer(0, 9)
    if kind < 3:
        return source.word
    if kind < 6:
        return source.name
    if kind == 6:
        return lambda: f"{source.word()} {source.word()}"
    if kind == 7:
        return lambda: f"the {source.word()}"
    if kind == 8:
        noun = source.pick(["room", "box", "user", "item", "locker", "page", source.word()])
        return lambda: f"{noun} {source.digits(source.integer(1, 4))}"
    return lambda: f"{source.name()}-{source.digits(2)}"


def _value_kind(source: Source) -> Callable[[], str]:
    """Return a generator of values that look alike, for one context."""
    kind = source.integer(0, 9)
    if kind < 5:
        count = source.pick([4, 4, 4, 3, 5, 6, 2])
        return lambda: source.digits(count)
    if kind < 7:
        return source.word
    if kind == 7:
        return source.name
    if kind == 8:
        return lambda: f"{source.word()[:2].upper()}{source.digits(2)}-{source.digits(3)}"
    return lambda: f"{source.word()} {source.word()}"


def _told_in_turns(source: Source, text: str) -> list[Message]:
    """The text cut into two to five messages at line or sentence ends, each noted by the assistant."""
    separator = "\n" if "\n" in text else ". "
    sentences = text.split(separator)
    size = -(-len(sentences) // source.integer(2, 5))
    messages: list[Message] = []
    for start in range(0, len(sentences), size):
        part = separator.join(sentences[start : start + size])
        if separator == ". " and start + size < len(sentences):
            part += "."
        messages += [{"role": "user", "content": part}, {"role": "assistant", "content": NOTED}]
    return messages


def _personal(source: Source) -> Case:
    """The user tells one to four things about himself and asks for one of them later."""
    told = source.sample(_PERSONAL, source.integer(1, 4))
    values = [_personal_value(source, statement) for statement, *_ in told]
    messages: list[Message] = []
    if source.chance(0.4):
        lead = " ".join(row[0].format(value) for row, value in zip(told, values, strict=True)) + " "
    else:
        lead = ""
        for (statement, _, _, reply), value in zip(told, values, strict=True):
            content = statement.format(value)
            if source.chance(0.3):
                content = source.pick(["Hello! ", "Hi, ", "By the way: ", "Please remember: "]) + content
            messages += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": reply.format(value)},
            ]
    index = source.integer(0, len(told) - 1)
    _, question, answer, _ = told[index]
    messages.append({"role": "user", "content": lead + question})
    return Case("recall", messages, answer.format(values[index]), "The user told me this before.")


def _personal_value(source: Source, statement: str) -> str:
    if "years" in statement or "number" in statement:
        return source.digits(source.integer(1, 2))
    if "color" in statement:
        return source.pick(words.COLORS)
    if "word" in statement or "work" in statement:
        return source.word()
    real = words.CITIES if "live" in statement else words.PEOPLE
    return source.pick(real) if source.chance(0.3) else source.name()

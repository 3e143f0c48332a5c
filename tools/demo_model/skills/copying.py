"""Copy a given text exactly: words, digits, punctuation, code, several lines and other scripts."""

from __future__ import annotations

import string

from demo_model.case import Case
from demo_model.source import Source, capitalized, choices

_BEFORE_TEXT = [
    choices("||||please |can you |could you |I want you to |now "),
    choices("repeat|copy|write|say|echo|type|output|print|return|give back|reproduce"),
    choices(" this| this text| the following| the following text| the text| these words| what follows|"),
    choices("|| exactly| word for word| unchanged| again| once more| as it is| and nothing else"),
    choices(': {}|: {}|:\n{}|:\n\n{}|: "{}"|: \'{}\'|.\n\n{}| "{}"'),
]
_AFTER_TEXT = [
    ["{}\n\n", "{}\n", '"{}" - ', '"{}"\n'],
    ["", "please ", "now "],
    ["repeat", "copy", "say", "write", "echo", "output"],
    [" the text above", " this", " that", " the above"],
    ["", " exactly", " word for word", " again"],
    [".", "", ", please."],
]
_SHORT = choices("Say {}|Repeat after me: {}|Say \"{}\"|Say: {}|Echo: {}|Repeat: {}|Please repeat: {}|Say '{}'")

_SCRIPTS = [
    "àáâäçèéêëìíîïñòóôöùúûüßæøåčšžłń",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "абвгдежзиклмнопрстуфхцчшщыэюя",
    "日本語中文字漢大小山川水火木金土月人",
    "あいうえおかきくけこさしすせそ",
    "가나다라마바사아자차카타파하",
    "אבגדהוזחטיכלמנ",
    "ابتثجحخدذرزسش",
    "😀😂🙂😍🤖👍🎉🚀🌍🌊🔥💡⭐🐱🐶🍎",
    "→←↑↓≤≥≠±×÷∞√∑∂€£¥§©°",
    "́̂̃̈",
]


def generate(source: Source) -> Case:
    instruction = _instruction(source)
    text = _text(source)
    if "'" in instruction:
        text = text.replace("'", "-")
    return Case(
        "copy",
        [{"role": "user", "content": instruction.format(text)}],
        text,
        "The user wants this text back, unchanged.",
    )


def _instruction(source: Source) -> str:
    kind = source.rng.random()
    if kind < 0.6:
        pattern = source.composition(*_BEFORE_TEXT)
        return capitalized(pattern)
    if kind < 0.75:
        pattern = source.composition(*_AFTER_TEXT)
        for verb in _AFTER_TEXT[2]:
            pattern = pattern.replace(f"\n{verb}", f"\n{verb.capitalize()}")
        return pattern
    return source.pick(_SHORT)


def _text(source: Source) -> str:
    kind = source.rng.random()
    length = source.log_uniform(1, 25)  # in words
    if kind < 0.30:
        text = " ".join(source.word() for _ in range(length))
    elif kind < 0.42:
        text = source.filler(8 * length)
    elif kind < 0.54:
        text = " ".join(_token(source) for _ in range(length))
    elif kind < 0.64:
        text = "".join(source.pick(string.ascii_letters + string.digits) for _ in range(source.log_uniform(4, 60)))
    elif kind < 0.72:
        text = "".join(source.pick(string.digits) for _ in range(source.log_uniform(4, 40)))
    elif kind < 0.84:
        text = _foreign(source, length)
    elif kind < 0.90:
        text = "\n".join(_token(source) + " " + source.word() for _ in range(min(length, 12)))
    elif kind < 0.95:
        text = _code(source)
    else:
        text = _repetitive(source)
    # A text with quotes or blanks at its ends would leave open what is to be copied.
    return text.replace('"', "'").strip() or source.word()


def _token(source: Source) -> str:
    """A word in some case, a number, or a word with punctuation."""
    kind = source.integer(0, 5)
    word = source.word()
    if kind == 0:
        return word.upper()
    if kind == 1:
        return word.capitalize() + source.pick(".,;:!?")
    if kind == 2:
        return source.digits(source.integer(1, 6))
    if kind == 3:
        return f"{source.pick('([{<')}{word}{source.pick(')]}>')}"
    if kind == 4:
        return word[:3] + source.pick("-_/+*=@#$%&~^|") + source.digits(source.integer(1, 3))
    return word


def _foreign(source: Source, length: int) -> str:
    script = source.pick(_SCRIPTS)
    pieces = []
    for _ in range(min(length, 12)):
        foreign = "".join(source.pick(script) for _ in range(source.integer(1, 5)))
        pieces.append(source.pick([foreign, foreign, source.word() + foreign, source.word()]))
    return " ".join(pieces)


def _code(source: Source) -> str:
    name, argument, other = source.word(), source.word(), source.word()
    return source.pick(
        [
            f"def {name}({argument}):\n    return {argument} + {source.digits(2)}",
            f"for {name} in {argument}:\n    print({name}, {other})",
            f"{{{argument!r}: {source.digits(3)}, {other!r}: [{source.digits(1)}, {source.digits(2)}]}}",
            f"https://{name}.{other}.com/{argument}?id={source.digits(4)}",
            f"{name} --{argument} {source.digits(2)} --{other}={source.word()}",
            f"<{name} id='{source.digits(2)}'>{argument} {other}</{name}>",
        ]
    )


def _repetitive(source: Source) -> str:
    """Few different words many times over: what a copy by looking up the last few letters gets wrong."""
    vocabulary = [source.word()[: source.integer(1, 5)] for _ in range(source.integer(2, 4))]
    return " ".join(source.pick(vocabulary) for _ in range(source.integer(3, 12)))

"""EBNF: the same language as the notation says, with errors that name the place."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from llguidance import LLMatcher

from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.structured_output.ebnf import ebnf_to_lark
from minisgl.structured_output.ebnf_reader import EbnfError
from minisgl.structured_output.translate import to_llguidance
from minisgl.structured_output.trial_process import byte_vocabulary
from minisgl.structured_output.validator import GrammarValidator
from structured_output.drawing import Drawer

ARITHMETIC = r"""
root ::= expr "\n"            # a sum
expr ::= term ([-+*/] term)*
term ::= "(" expr ")"
       | number
number ::= ("0" | [1-9] [0-9]{0,2}) ("." [0-9]+)?
"""
JSON = r"""
root ::= ws object
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair ::= string ":" ws value
value ::= object | array | string | number | ("true" | "false" | "null") ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\bfnrt])* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ws
ws ::= [ \t\n]*
"""


def accepts(grammar: Grammar, text: str) -> bool:
    vocabulary = byte_vocabulary({})
    matcher = LLMatcher(vocabulary, to_llguidance(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        (ARITHMETIC, ["1\n", "12+(3*4.5)\n", "((1))\n"], ["1", "1+\n", "(1\n", "1234\n", "1.\n", "\n"]),
        (JSON, ["{}", ' {"a": [1, -2.5, {"b\\n": null}], "": true}\n'], ["", "[]", '{"a"}', '{"a": 01}', '{"a": 1,}']),
        ('root ::= [a-z]+ "x"', ["abx", "xx"], ["x", "ab"]),
        ('root ::= word "x"\nword ::= [a-z]+', ["abx"], ["x"]),
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab"]),
        ('root ::= "a"\n  | "b"\n\n  | ""', ["a", "b", ""], ["ab"]),
        (r'root ::= "\u00e9\x41\U0001F600" [\u00e0-\u00e2]', ["éA😀á"], ["éA😀ã"]),
        (r"root ::= [^\]\-^a-c]", ["d", "é", "\n"], ["]", "-", "^", "b", ""]),
        (r"root ::= [-a] [a-] [\-] ", ["-a-", "a--"], ["b--"]),
        ("root ::= . .", ["ab", "é☃"], ["a", "a\n"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{,}'.replace("{,}", "?"), ["aab", "aabbccd"], ["ab", "aabccc", "aabdd"]),
        ('root ::= nested\nnested ::= ("(" nested ")")* ', ["", "()", "(())()"], ["(", ")("]),
        ('root ::= a-b c_d E1\na-b ::= "1"\nc_d ::= "2"\nE1 ::= "3"', ["123"], ["12"]),
        (r'root ::= "\"\\/\n\t\r"', ['"\\/\n\t\r'], ["x"]),
        ('root ::= [a-z]+ "x" (">" root)?', ["abx", "abx>xx"], ["ab", "abx>x"]),
        ('root ::= root "a" | "b"', ["b", "baaa"], ["a", "ab"]),
        ('root ::= ("a")' + ' ("b")' * 200, ["a" + "b" * 200], ["a"]),
    ],
)
def test_a_translated_grammar_accepts_the_same_language(text: str, yes: list[str], no: list[str]) -> None:
    grammar = Grammar("ebnf", text)
    assert [one for one in yes if not accepts(grammar, one)] == []
    assert [one for one in no if accepts(grammar, one)] == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no rule 'root'"),
        ('a ::= "x"', "no rule 'root'"),
        ("root ::= foo", "line 1, column 10: there is no rule 'foo'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: a second rule 'root'"),
        ('root ::= "a" )', r"line 1, column 14: unexpected '\)'"),
        ('root ::= ("a"', "unexpected end"),
        ('root ::= "a', "line 1, column 10"),
        ("root ::= [z-a]", "z-a is no range"),
        ("root ::= []", "empty class"),
        (r'root ::= "\q"', r"unknown escape \\q"),
        (r'root ::= "\ud800"', "is no character"),
        ('root ::= "a"{3,2}', "no number of repetitions"),
        ('root ::= "a"{100000}', "at most 10000"),
        (f'root ::= "a"{{1,{"9" * 5000}}}', "at most 10000"),  # Python reads numbers of up to 4,300 digits
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested deeper"),
        ("root ::= (=lookahead)", "unexpected '=look"),
        ("root = x", "unexpected '= x'"),
    ],
)
def test_errors_name_the_place(text: str, error: str) -> None:
    with pytest.raises(EbnfError, match=error):
        ebnf_to_lark(text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("ebnf", "root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{n + 1}' for n in range(9000)) + '\nr9000 ::= "a"'),
        Grammar("lark", "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(12000)) + '\nr12000: "a"'),
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "$ref": "#/$defs/0",
                    "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(5000)} | {"5000": {}},
                }
            ),
        ),
    ],
    ids=["ebnf", "lark", "json_schema"],
)
def test_long_chains_of_rules_overflow_no_stack(drawer: Drawer, grammar: Grammar) -> None:
    assert len(grammar.text) > 170_000
    GrammarValidator({}, time_limit=60.0).validate(grammar)
    assert drawer.allowed(drawer.matchers.start(SamplingParams(grammar=grammar))).any()


def test_regular_grammars_are_the_regular_expressions_that_they_spell() -> None:
    rng = random.Random(0)

    def expression(depth: int) -> tuple[str, str]:
        """Draw a language; write it in EBNF and as a regular expression."""
        kind = rng.randrange(4 if depth else 1)
        if kind == 0:
            return rng.choice([('"a"', "a"), ('"ab"', "ab"), ("[ab]", "[ab]"), ('"b"', "b"), ('""', "")])
        (left, left_re), (right, right_re) = expression(depth - 1), expression(depth - 1)
        if kind == 1:
            return f"({left} {right})", f"(?:{left_re}{right_re})"
        if kind == 2:
            return f"({left} | {right})", f"(?:{left_re}|{right_re})"
        mark = rng.choice(["*", "?", "+", "{2}", "{1,2}"])
        return f"({left}){mark}", f"(?:{left_re}){mark}"

    for _ in range(60):
        ebnf, regex = expression(4)
        grammar = Grammar("ebnf", f"root ::= middle\nmiddle ::= {ebnf}")
        for _ in range(12):
            text = "".join(rng.choices("ab", k=rng.randrange(6)))
            assert accepts(grammar, text) == bool(re.fullmatch(regex, text)), f"{text!r} under {ebnf}"


def test_drawn_texts_belong_to_the_language(drawer: Drawer) -> None:
    for seed in range(5):
        text = drawer.draw(Grammar("ebnf", ARITHMETIC), seed, greedy=seed == 0, max_tokens=60)
        if text is not None:
            assert re.fullmatch(r"[-+*/().0-9]+\n", text)
            assert np.isfinite(float(eval(text.replace("/", "+"), {"__builtins__": {}})))

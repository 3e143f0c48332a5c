"""Matchers as the scheduler drives them: ends, stop ids, masks of mixed rows, what compiles meanwhile."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, models

from minisgl.core import Int32Array
from minisgl.sampling_params import Grammar, InvalidRequest, SamplingParams
from minisgl.structured_output import automata as automata_module
from minisgl.structured_output.automata import MAX_AUTOMATA
from minisgl.structured_output.matcher import GrammarMatcher, GrammarMatchers
from minisgl.structured_output.protocol import MatcherStatus
from minisgl.structured_output.translate import lark_rule
from minisgl.structured_output.validator import GrammarValidator
from structured_output.drawing import EOS, Drawer, filled
from tokenizer import small

LETTERS = Grammar("regex", "[ab]{2,3}")


def start(drawer: Drawer, grammar: Grammar, **sampling: object) -> GrammarMatcher:
    return drawer.matchers.start(SamplingParams(grammar=grammar, **sampling))  # type: ignore[arg-type]


def ids_of(drawer: Drawer, *texts: str) -> list[int]:
    return [drawer.tokenizer.token_to_id(text) for text in texts]


def allowed(drawer: Drawer, matcher: GrammarMatcher) -> set[str]:
    return {drawer.tokenizer.id_to_token(index) for index in np.flatnonzero(drawer.allowed(matcher))}


def advance(drawer: Drawer, matcher: GrammarMatcher, text: str) -> MatcherStatus:
    (status,) = drawer.matchers.advance([matcher], np.array(ids_of(drawer, text), dtype=np.int32))
    return status


def test_ends_are_allowed_where_the_grammar_accepts_one(drawer: Drawer) -> None:
    matcher = start(drawer, LETTERS)
    assert {"a", "b"} <= allowed(drawer, matcher)
    assert EOS not in allowed(drawer, matcher)
    assert advance(drawer, matcher, "a") is MatcherStatus.OPEN
    assert EOS not in allowed(drawer, matcher)
    assert advance(drawer, matcher, "b") is MatcherStatus.OPEN
    assert EOS in allowed(drawer, matcher)
    assert advance(drawer, matcher, EOS) is MatcherStatus.COMPLETE
    matcher = start(drawer, LETTERS)
    assert [advance(drawer, matcher, letter) for letter in "aba"] == [
        MatcherStatus.OPEN,
        MatcherStatus.OPEN,
        MatcherStatus.COMPLETE,
    ]
    matcher = start(drawer, LETTERS)
    assert advance(drawer, matcher, EOS) is MatcherStatus.FAILED
    matcher = start(drawer, LETTERS)
    assert advance(drawer, matcher, "c") is MatcherStatus.FAILED


def test_allowed_ids_that_leave_the_grammar_nothing(drawer: Drawer) -> None:
    """The sampler chooses all the same, by chance also what one of the two allows."""
    a, c = ids_of(drawer, "a", "c")
    for text in ("a", "b", "c", EOS):
        assert advance(drawer, start(drawer, LETTERS, allowed_token_ids=(c,)), text) is MatcherStatus.EXCLUDED
    matcher = start(drawer, LETTERS, allowed_token_ids=(a, c, drawer.eos), stop_token_ids=(c,))
    assert advance(drawer, matcher, "a") is MatcherStatus.OPEN
    assert advance(drawer, matcher, "a") is MatcherStatus.OPEN
    assert advance(drawer, matcher, "c") is MatcherStatus.COMPLETE


def test_a_grammar_that_is_too_complex_excludes_nothing(drawer: Drawer) -> None:
    matcher = start(drawer, LETTERS, allowed_token_ids=tuple(ids_of(drawer, "a")))
    assert matcher.ll_matcher is not None
    matcher.ll_matcher.consume_token(drawer.eos)  # puts llguidance's matcher into its error state
    (c,) = ids_of(drawer, "c")
    assert matcher.advance(c) is MatcherStatus.FAILED


def test_ignore_eos_takes_ends_away_as_long_as_anything_can_follow(drawer: Drawer) -> None:
    matcher = start(drawer, LETTERS, ignore_eos=True)
    advance(drawer, matcher, "a")
    advance(drawer, matcher, "b")
    assert EOS not in allowed(drawer, matcher)
    assert allowed(drawer, start(drawer, Grammar("regex", ""), ignore_eos=True)) == {EOS}


def test_own_stop_ids_are_allowed_only_where_an_end_is(drawer: Drawer) -> None:
    stop = ids_of(drawer, "c", "b")
    matcher = start(drawer, LETTERS, stop_token_ids=tuple(stop))
    assert not {"b", "c"} & allowed(drawer, matcher), "stop ids are not allowed in the middle of the grammar"
    assert advance(drawer, matcher, "a") is MatcherStatus.OPEN
    assert "b" in allowed(drawer, matcher), "behind it the grammar accepts an end"
    assert "c" not in allowed(drawer, matcher)
    assert advance(drawer, matcher, "a") is MatcherStatus.OPEN
    assert {"a", "b", "c", EOS} <= allowed(drawer, matcher)
    assert advance(drawer, matcher, "c") is MatcherStatus.COMPLETE
    matcher = start(drawer, LETTERS, stop_token_ids=tuple(stop), ignore_eos=True)
    advance(drawer, matcher, "a")
    advance(drawer, matcher, "a")
    assert EOS not in allowed(drawer, matcher)
    assert "c" in allowed(drawer, matcher)


def test_a_stop_id_ends_even_a_grammar_that_allows_it(drawer: Drawer) -> None:
    """The request asked for both: the grammar allows the id, and the id ends the answer."""
    matcher = start(drawer, Grammar("regex", "abc"), stop_token_ids=tuple(ids_of(drawer, "b")))
    assert advance(drawer, matcher, "a") is MatcherStatus.OPEN
    assert "b" in allowed(drawer, matcher)
    assert advance(drawer, matcher, "b") is MatcherStatus.COMPLETE


def test_a_stop_id_with_the_bytes_of_another_token_waits_for_an_end() -> None:
    """The vocabulary has <0x62> for texts that lack `b`; a bitmask allows only one of the two."""
    tokenizer = small.llama()
    a, b, stop, eos = (tokenizer.token_to_id(token) for token in ("a", "b", "<0x62>", "</s>"))
    size = tokenizer.get_vocab_size()
    matchers = GrammarMatchers(lambda: tokenizer, vocab_size=size, eos_token_ids=[eos], threads=1)
    matcher = matchers.start(SamplingParams(grammar=Grammar("regex", "ab+"), stop_token_ids=(stop,)))
    for token, ends in ((a, set()), (b, {stop, eos})):
        matchers.advance([matcher], np.array([token], dtype=np.int32))
        bits = np.unpackbits(filled(matchers, [matcher], size).view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) & {b, stop, eos} == {b, *ends}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("choice", json.dumps([f"{EOS}x"])),
        Grammar("regex", rf"a{EOS}x".replace("|", r"\|")),
        Grammar("regex", r"a\u{3c}\|end\|\U0000003ex"),
        Grammar("json_schema", json.dumps({"const": f"a{EOS}"})),
        Grammar("json_schema", json.dumps({"type": "object", "properties": {EOS: {"const": 1}}, "required": [EOS]})),
        Grammar("ebnf", f'root ::= "a" "{EOS}" "x"'),
    ],
)
def test_the_text_of_a_special_token_is_spelt_with_others(drawer: Drawer, grammar: Grammar) -> None:
    for seed in range(3):
        text = drawer.draw(grammar, seed, greedy=True)
        assert text is not None
        assert EOS in text


def test_rows_of_a_mask_are_independent(drawer: Drawer) -> None:
    matchers = [start(drawer, LETTERS), None, start(drawer, Grammar("regex", "[cd]")), None]
    mask = filled(drawer.matchers, matchers, drawer.vocab_size)
    assert (mask[1] == -1).all()
    assert (mask[3] == -1).all()
    for row in (0, 2):
        (alone,) = filled(drawer.matchers, [matchers[row]], drawer.vocab_size)
        assert (mask[row] == alone).all()
    assert (mask[0] != mask[2]).any()


def test_requests_with_one_grammar_do_not_disturb_each_other(drawer: Drawer) -> None:
    first, second = start(drawer, LETTERS), start(drawer, LETTERS)
    advance(drawer, first, "a")
    advance(drawer, first, "b")
    assert EOS in allowed(drawer, first)
    assert EOS not in allowed(drawer, second)


def test_more_grammars_than_are_kept(drawer: Drawer) -> None:
    matchers = [start(drawer, Grammar("regex", f"a{{{count}}}")) for count in range(1, MAX_AUTOMATA + 20)]
    assert all("a" in allowed(drawer, matcher) for matcher in matchers)


def test_requests_at_a_time_have_automata_of_their_own(drawer: Drawer) -> None:
    matchers = GrammarMatchers(lambda: drawer.tokenizer, vocab_size=300, eos_token_ids=[drawer.eos], threads=3)
    sampling = SamplingParams(grammar=LETTERS)
    users = [matchers.start(sampling) for _ in range(7)]
    assert sorted(len(one.users) for one in {user.automaton for user in users}) == [2, 2, 3]
    masks = filled(matchers, [*users, None], 300)
    assert (masks[:7] == masks[0]).all()
    assert (masks[7] == -1).all()
    freed = users.pop(0).automaton
    del users[:]
    assert matchers.start(sampling).automaton is freed, "one that has been used before is taken first"


def test_a_vocabulary_larger_than_the_models_logits(drawer: Drawer) -> None:
    eos = drawer.eos
    small = GrammarMatchers(lambda: drawer.tokenizer, vocab_size=300, eos_token_ids=[eos], threads=1)
    (mask,) = filled(small, [small.start(SamplingParams(grammar=LETTERS))], 300)
    (whole,) = filled(drawer.matchers, [start(drawer, LETTERS)], drawer.vocab_size)
    assert (mask == whole[: len(mask)]).all()


@pytest.mark.parametrize("vocab_size", [300, 320])
def test_ids_that_the_model_lacks_are_no_other_continuation(drawer: Drawer, vocab_size: int) -> None:
    """A stop id that is the only token which the model can choose stays allowed, and so does an end with ignore_eos."""
    letter, other = ids_of(drawer, "a", "b")
    beyond = vocab_size  # the first that the model lacks
    row = np.zeros(-(-(beyond + 1) // 32), dtype=np.int32)
    bits = row.view(np.uint32)
    for stops, ignore_eos, eos in (((letter,), False, other), ((), True, letter)):
        small = GrammarMatchers(lambda: drawer.tokenizer, vocab_size=vocab_size, eos_token_ids=[eos], threads=1)
        sampling = SamplingParams(grammar=Grammar("regex", "ab"), stop_token_ids=stops, ignore_eos=ignore_eos)
        matcher = small.start(sampling)
        assert matcher.ll_matcher is not None
        row[:] = 0
        for token in (letter, beyond):
            bits[token // 32] |= np.uint32(1 << token % 32)
        matcher.adjust(row, matcher.ll_matcher, vocab_size)
        assert bits[letter // 32] >> np.uint32(letter % 32) & 1


def test_a_tokenizer_that_llguidance_cannot_use_fails_requests_and_nothing_else() -> None:
    def load() -> Tokenizer:
        return Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))

    matchers = GrammarMatchers(load, vocab_size=64, eos_token_ids=[1])
    matcher = matchers.start(SamplingParams(grammar=LETTERS))
    mask = filled(matchers, [matcher, None], 64)
    assert (mask[1] == -1).all()
    (status,) = matchers.advance([matcher], np.array([0], dtype=np.int32))
    assert status is MatcherStatus.UNUSABLE


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar("choice", '["yes", "no", "yes indeed", "a/b\\n\\"c\\""]'), {"yes", "no", "yes indeed", 'a/b\n"c"'}),
        (Grammar("regex", "(red|green) apples?"), {"red apple", "red apples", "green apple", "green apples"}),
        (Grammar("regex", "a/\\\n(b\\/|\n)"), {"a/\nb/", "a/\n\n"}),
        (Grammar("ebnf", 'root ::= ("x" | "y") "!"{1,2}'), {"x!", "x!!", "y!", "y!!"}),
        (Grammar("lark", 'start: "x" (A | "c")\nA: /[ab]/'), {"xa", "xb", "xc"}),
        (Grammar("json_schema", '{"enum": ["a", 1, null]}'), {'"a"', "1", "null"}),
    ],
    ids=lambda one: one.kind if isinstance(one, Grammar) else None,
)
def test_every_kind_allows_its_texts_and_no_others(drawer: Drawer, grammar: Grammar, texts: set[str]) -> None:
    GrammarValidator({}).validate(grammar)
    drawn = {drawer.draw(grammar, seed, greedy=False, haste=0.0) for seed in range(60)}
    assert drawn == texts
    inner = Grammar("lark", f'start: "<" inner ">"\n{lark_rule("inner", grammar)}')
    GrammarValidator({}).validate(inner)
    assert {drawer.draw(inner, seed, greedy=False, haste=0.0) for seed in range(60)} == {f"<{text}>" for text in texts}


def test_json_object_is_an_object(drawer: Drawer) -> None:
    for seed in range(10):
        text = drawer.draw(Grammar("json_object"), seed, greedy=seed == 0)
        assert text is None or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "a(?=b)"), "look-around"),
        (Grammar("regex", r"(a)\1"), "backreferences"),
        (Grammar("regex", "("), "unclosed"),
        (Grammar("regex", "a\\"), "end with a backslash"),
        (Grammar("regex", "x" * 300_000), "262144 characters"),
        (Grammar("choice", "[]"), "1 to 10000 choices"),
        (Grammar("choice", '{"a": 1}'), "list of strings"),
        (Grammar("ebnf", 'root ::= "a" foo'), "no rule 'foo'"),
        (Grammar("ebnf", "root ::= root"), "allows no text"),
        (Grammar("lark", "start: <|nothing|>"), "unknown special token"),
        (Grammar("lark", "begin: "), "start"),
    ],
)
def test_refused_with_its_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        GrammarValidator({}).validate(grammar)
    assert caught.value.field == "structured_outputs"
    with pytest.raises(InvalidRequest) as renamed:
        GrammarValidator({}).validate(grammar, "regex")
    assert renamed.value.field == "regex"


def test_a_grammar_that_takes_too_long_is_refused_in_time() -> None:
    validator = GrammarValidator({}, time_limit=0.2)
    hard = Grammar("regex", "(a{1000}){1000}")
    with pytest.raises(InvalidRequest, match="longer than"):
        validator.validate(hard)
    validator.validate(LETTERS)  # others go on


def test_grammars_may_name_the_models_special_tokens() -> None:
    validator = GrammarValidator({5: "<|tool|>", 151_657: "<tool_call>"})
    validator.validate(Grammar("lark", 'start: <|tool|> "x" <[151657]>'))


MANY_STATES = Grammar("regex", "[ab]*a[ab]{16}c")  # each text so far is another state


def small_automata(drawer: Drawer, monkeypatch: pytest.MonkeyPatch, states: int) -> GrammarMatchers:
    """Matchers whose automata hold so many states."""
    limits = LLParserLimits(max_lexer_states=states, precompute_large_lexemes=False, verbose_errors=False)
    monkeypatch.setattr(automata_module, "PARSER_LIMITS", limits)
    tokenizer = drawer.tokenizer
    return GrammarMatchers(lambda: tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=ids_of(drawer, EOS))


def masks(drawer: Drawer, rows: int) -> Int32Array:
    return np.zeros((rows, -(-drawer.tokenizer.get_vocab_size() // 32)), dtype=np.int32)


def test_an_automaton_that_many_requests_have_filled_is_replaced(
    drawer: Drawer, monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers = small_automata(drawer, monkeypatch, 1000)
    sampling, rng = SamplingParams(grammar=MANY_STATES), np.random.default_rng(0)
    letters = ids_of(drawer, "a", "b")
    mask = masks(drawer, 3)
    used = set()  # keeps them, so that none takes the place of another
    for _ in range(10):
        several = [matchers.start(sampling) for _ in mask]
        for _ in range(60):
            matchers.fill(mask, several)
            assert np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, letters].all()
            chosen = rng.choice(letters, len(mask)).astype(np.int32)
            assert matchers.advance(several, chosen) == [MatcherStatus.OPEN] * len(mask)
        used |= {one.automaton for one in several}
    assert len(used) > len(mask)


def test_a_long_answer_continues_with_a_new_automaton(drawer: Drawer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay continues where an answer has more tokens than llguidance follows at once."""
    matchers = small_automata(drawer, monkeypatch, 50_000)
    matcher, rng = matchers.start(SamplingParams(grammar=MANY_STATES)), np.random.default_rng(0)
    first, letters = matcher.automaton, ids_of(drawer, "a", "b")
    mask = masks(drawer, 1)
    for _ in range(36_000):
        matchers.fill(mask, [matcher])
        assert matchers.advance([matcher], rng.choice(letters, 1).astype(np.int32)) == [MatcherStatus.OPEN]
    assert matcher.automaton is not first


def test_a_grammar_that_fills_an_automaton_alone_fails(drawer: Drawer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer does not end as if it were complete."""
    matchers = small_automata(drawer, monkeypatch, 60)
    matcher = matchers.start(SamplingParams(grammar=MANY_STATES))
    mask = masks(drawer, 1)
    rng = np.random.default_rng(0)
    for _ in range(100):
        matchers.fill(mask, [matcher])
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        going_on = np.intersect1d(allowed, ids_of(drawer, "a", "b"))
        chosen = rng.choice(going_on if len(going_on) else allowed, 1)
        (status,) = matchers.advance([matcher], chosen.astype(np.int32))
        if status is not MatcherStatus.OPEN:
            break
    assert status is MatcherStatus.FAILED


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", 'start: %json {"const": "<think>"}'),
        ("lark", 'start: "<think>"'),
        ("json_schema", r'{"const": "\u003cthink>"}'),
        ("regex", r"\x3cthink>"),
        ("regex", r"\x{3c}think\x3e"),
        ("regex", "<thi(nk>)"),
        ("ebnf", 'root ::= "<th" "ink>"'),
    ],
)
def test_the_text_of_a_special_token_however_it_is_written(kind: str, text: str) -> None:
    from minisgl.llm import LLM

    with LLM("demo", max_seq_len_override=512) as llm:
        grammar = Grammar(kind, text)  # type: ignore[arg-type]
        (answer,) = llm.generate("hello", SamplingParams(grammar=grammar, max_tokens=40))
    assert (answer["text"].strip('"'), answer["finish_reason"]) == ("<think>", "stop")

"""The process that tries grammars, and what becomes of it."""

from __future__ import annotations

import signal

import pytest

from minisgl.core import Grammar, InvalidRequest
from minisgl.grammar.trial import TrialFailed, TrialProcess, Verdict
from minisgl.grammar.validate import GrammarValidator

LETTERS = Grammar("regex", "[ab]{2,3}")
ENDLESS = Grammar("regex", "((a{1000}){1000}){1000}")  # takes minutes, and all memory


def test_a_trial_ends_no_process_but_its_own() -> None:
    """However a grammar brings it down."""
    trial = TrialProcess({})
    assert trial.verdict(LETTERS, 10.0) == Verdict()
    with pytest.raises(TrialFailed, match="longer"):
        trial.verdict(ENDLESS, 0.2)
    assert trial._process.returncode == -signal.SIGKILL
    another = TrialProcess({})
    another._process.kill()
    with pytest.raises(TrialFailed, match="fails"):
        another.verdict(LETTERS, 10.0)


def test_no_grammar_keeps_others_from_being_checked() -> None:
    validator = GrammarValidator({}, time_limit=0.5)
    checks = [validator.check(Grammar("regex", f"{ENDLESS.text}{number}")) for number in range(5)]
    validator.validate(LETTERS)
    for check in checks:
        with pytest.raises(InvalidRequest, match="longer than"):
            check.result()


def test_a_valid_grammar_is_not_refused_because_somebody_killed_the_process_that_waited_for_it() -> None:
    validator = GrammarValidator({}, time_limit=10.0)
    validator.validate(LETTERS)
    (idle,) = validator._idle
    idle._process.kill()
    idle._process.wait()
    validator.validate(Grammar("regex", "[cd]"))

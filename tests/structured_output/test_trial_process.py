"""The process that tries grammars, and what becomes of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

import minisgl
from minisgl.sampling_params import MAX_GRAMMAR_CHARS, Grammar, InvalidRequest
from minisgl.structured_output import validator as validator_module
from minisgl.structured_output.translate import ebnf_as_lark
from minisgl.structured_output.trial_process import WAIT_FACTOR
from minisgl.structured_output.trials import GrammarCheck, Outcome, Trial, TrialProcess
from minisgl.structured_output.validator import CONCURRENCY, CheckFailed, GrammarValidator

LETTERS = Grammar("regex", "[ab]{2,3}")
ENDLESS = Grammar("regex", "((a{1000}){1000}){1000}")  # takes minutes, and all memory


def outcome_of(process: TrialProcess, *trials: Trial) -> list[Outcome]:
    """Have these begin at the same time, and wait for them; return their outcomes in the order that they end."""
    os.kill(process.pid, signal.SIGSTOP)
    for trial in trials:
        process.start(trial)
    os.kill(process.pid, signal.SIGCONT)
    outcomes: list[Outcome] = []
    while len(outcomes) < len(trials):
        outcomes += process.poll(1.0)
    return outcomes


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_grammar_ends_no_process_but_its_own() -> None:
    """A process that had to be ended took a second to replace, in which others waited."""
    trials = TrialProcess({})
    pid = trials.pid
    begin = time.monotonic()
    outcomes = outcome_of(trials, Trial(1, ENDLESS, 0.5), Trial(2, LETTERS, 10.0))
    gave_up_waiting = time.monotonic() - begin > 0.5 * WAIT_FACTOR  # a machine so busy gives less processor time
    assert [outcome.number for outcome in outcomes] == [2, 1]
    assert outcomes[0].check == GrammarCheck()
    assert outcomes[1].check == GrammarCheck("it takes longer than 0.5 s to compile")
    assert outcomes[1].seconds < 1.5, "the limit counts processor time, even on a busy machine"
    # The timer counts ticks, also those in which a virtual machine's host ran others; the seconds do not.
    assert outcomes[1].seconds > 0.25 or gave_up_waiting
    (again,) = outcome_of(trials, Trial(3, LETTERS, 10.0))
    assert again.check == GrammarCheck()
    assert trials.pid == pid
    assert trials.end.alive
    assert children(pid) == []


def test_a_process_that_does_not_read_holds_up_nobody() -> None:
    """More than a pipe takes is written when there is room again."""
    long = Trial(1, Grammar("choice", f'["{"x" * 200_000}"]'), 10.0)
    (outcome,) = outcome_of(TrialProcess({}), long)  # which stops it while the trial is sent
    assert outcome.check == GrammarCheck()


@pytest.mark.parametrize(
    ("end", "message"),
    [(signal.SIGSEGV, "the compiler fails"), (signal.SIGALRM, "it takes longer than 30 s to compile")],
    ids=["crash", "wait"],
)
def test_a_grammar_that_fells_its_process_is_refused(end: signal.Signals, message: str) -> None:
    trials = TrialProcess({})
    trials.start(Trial(1, ENDLESS, 30.0))
    outcomes: list[Outcome] = []
    while not (found := children(trials.pid)):
        assert not trials.poll(0.01)
    os.kill(found[0], end)
    while not outcomes:
        outcomes = trials.poll(1.0)
    assert outcomes[0].check.message == message


def test_a_grammar_gets_no_more_memory_than_its_share() -> None:
    """However much time it has. With more of both, it would have filled the machine."""
    trials = TrialProcess({})
    (small,) = outcome_of(trials, Trial(1, LETTERS, 10.0, max_bytes=32 * 2**20))
    assert small.check == GrammarCheck()
    (outcome,) = outcome_of(trials, Trial(2, ENDLESS, 60.0, max_bytes=32 * 2**20))
    assert outcome.check.message == "the compiler fails"
    assert outcome.seconds < 10


def test_no_grammar_keeps_others_from_being_checked() -> None:
    """Many slow grammars delay others neither from one client nor from many."""
    validator = GrammarValidator({}, time_limit=60.0)  # none of the slow ones ends before it is told to
    hard = [Grammar("regex", f"{ENDLESS.text}{number}") for number in range(12)]
    checks = [validator.check(grammar, "hostile") for grammar in hard[:8]]
    validator.validate(LETTERS, "honest")
    assert not any(check.is_done for check in checks), "the client's grammar was tried before all of the others"
    assert len(validator._queue) == 7
    checks += [validator.check(grammar, f"hostile {number}") for number, grammar in enumerate(hard[8:])]
    honest = validator.check(Grammar("regex", "[cd]"), "honest")
    assert validator._process is not None
    while len(running := children(validator._process.pid)) < CONCURRENCY:
        validator.poll(0.01)
    assert not honest.is_done
    os.kill(running[0], signal.SIGALRM)  # as at the limit of real time
    honest.result()
    assert sum(check.is_done for check in checks) == 1, "the next place was the client's"
    while not all(check.is_done for check in checks):
        for child in children(validator._process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGALRM)
        validator.poll(0.01)
    for check in checks:
        with pytest.raises(InvalidRequest, match="longer than"):
            check.result()


def test_grammars_of_abandoned_requests_are_not_tried() -> None:
    validator = GrammarValidator({}, time_limit=0.5)
    running, waiting = (validator.check(Grammar("regex", f"{ENDLESS.text}{number}"), "a") for number in range(2))
    twice = [validator.check(LETTERS, "a") for _ in range(2)]
    waiting.abandon()
    twice[0].abandon()
    running.abandon()  # its trial is running
    assert twice[1].result() == LETTERS
    assert not waiting.is_done
    validator.poll()
    assert len(validator._queue) == 0


def test_a_valid_grammar_outlives_a_killed_trial_process() -> None:
    validator = GrammarValidator({}, time_limit=10.0)
    validator.validate(LETTERS)
    first = validator._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    validator.validate(Grammar("regex", "[cd]"))
    assert validator._process is not first
    check = validator.check(ENDLESS)
    for _ in range(2):
        killed = validator._process
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
        while validator._process is killed:
            validator.poll(0.1)
    with pytest.raises(CheckFailed):
        check.result()
    again = validator.check(ENDLESS)
    assert not again.is_done, "it is tried again for the next request"
    again.abandon()
    validator.validate(Grammar("regex", "[ef]"))


def test_an_error_of_ours_is_not_the_clients() -> None:
    trials = TrialProcess({})
    (outcome,) = outcome_of(trials, Trial(1, Grammar("template", "%grammar a [1, 2, 3]"), 10.0))
    assert "TypeError" in outcome.check.failure
    validator = GrammarValidator({})
    with pytest.raises(CheckFailed):
        validator.validate(Grammar("template", "%grammar a [1, 2, 3]"))


def test_slow_translations_run_once_and_in_the_trial_process() -> None:
    """A long text in EBNF held the tokenizer worker up for a second, and the scheduler for another."""
    rules = [f'x{number} ::= "abcdefgh" root? [a-z]' for number in range(6000)]
    ebnf = "\n".join(['root ::= "a" root?', *rules])
    assert len(ebnf) < MAX_GRAMMAR_CHARS
    begin = time.process_time()
    ebnf_as_lark(Grammar("ebnf", ebnf))
    translating = time.process_time() - begin
    validator = GrammarValidator({}, time_limit=60.0)
    validator.validate(LETTERS)  # the process is there
    begin = time.process_time()
    check = validator.check(Grammar("ebnf", ebnf))
    found = check.result()
    assert time.process_time() - begin < translating / 4
    assert found.kind == "lark"


def test_known_grammars_take_no_memory() -> None:
    """A result is kept, but not the grammar: 128 of them took 130 MB in each tokenizer worker until others came."""
    count, megabyte = 20, "\U0001f600" * 262_000
    grammars = (Grammar("json_schema", f'{{"description": "{index} {megabyte}"}}') for index in range(count))
    validator = GrammarValidator({}, time_limit=60.0)
    validator.validate(LETTERS)
    tracemalloc.start()
    try:
        for grammar in grammars:
            validator.validate(grammar)
        assert tracemalloc.get_traced_memory()[0] < 3_000_000
    finally:
        tracemalloc.stop()
    again = Grammar("json_schema", f'{{"description": "0 {megabyte}"}}')
    assert validator.check(again).is_done


@pytest.mark.parametrize(("kind", "text"), [("ebnf", 'root ::= "{}"'), ("json_schema", '{{"type": "{}"}}')])
def test_texts_of_results_are_bounded_in_bytes(
    kind: Literal["ebnf", "json_schema"], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EBNF is kept in Lark, and the refusal of a schema repeats a name in it: both may be as long as the grammar."""
    monkeypatch.setattr(validator_module, "MAX_RESULT_BYTES", 190_000)
    validator = GrammarValidator({}, time_limit=60.0)
    grammars = [Grammar(kind, text.format(f"{index}{'x' * 50_000}")) for index in range(5)]
    for grammar in grammars:
        with suppress(InvalidRequest):
            validator.validate(grammar)
    is_known = [validator.check(grammar).is_done for grammar in grammars]
    assert is_known == [False, False, True, True, True], "three texts have room"


def test_the_process_finds_the_package_where_its_parent_found_it(tmp_path: Path) -> None:
    """Only the parent's own search path says where. The copy refuses everything, so that it is known."""
    package = tmp_path / "elsewhere" / "minisgl"
    left_out = shutil.ignore_patterns("demo", "csrc", "__pycache__")
    shutil.copytree(Path(minisgl.__file__).parent, package, ignore=left_out)
    with (package / "structured_output" / "translate.py").open("a") as text:
        text.write("\n\ndef to_llguidance(_): raise ValueError('elsewhere')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "from minisgl.sampling_params import Grammar\n"
        "from minisgl.structured_output.trials import Trial, TrialProcess\n"
        "process = TrialProcess({})\n"
        "process.start(Trial(1, Grammar('regex', '[ab]'), 10.0))\n"
        "while not (outcomes := process.poll(1.0)): pass\n"
        "print(outcomes[0].check.message)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "elsewhere\n"

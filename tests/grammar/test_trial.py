"""The process that tries grammars, and what becomes of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import minisgl
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


def test_the_process_finds_the_package_where_its_parent_found_it(tmp_path: Path) -> None:
    """Also where only the parent's own search path says so. The copy refuses everything, so that it is known."""
    package = tmp_path / "elsewhere" / "minisgl"
    left_out = shutil.ignore_patterns("demo", "csrc", "__pycache__")
    shutil.copytree(Path(minisgl.__file__).parent, package, ignore=left_out)
    with (package / "grammar" / "text.py").open("a") as text:
        text.write("\n\ndef to_llguidance(_): raise ValueError('elsewhere')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "from minisgl.core import Grammar\n"
        "from minisgl.grammar.trial import TrialProcess\n"
        "print(TrialProcess({}).verdict(Grammar('regex', '[ab]'), 10.0).message)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "elsewhere\n"

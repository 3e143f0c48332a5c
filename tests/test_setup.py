"""scripts/setup installs what was asked for, and nothing twice."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("before", "asked", "installs"),
    [
        (None, "", True),
        ("", "", False),
        ("dev", "", False),
        ("dev", "dev", False),
        ("dev", "cuda", True),
        ("cuda", "dev", True),
        ("", "dev", True),
    ],
)
def test_the_extra_that_was_asked_for_is_there(tmp_path: Path, before: str | None, asked: str, installs: bool) -> None:
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> installed\n')
    python.chmod(0o755)

    def setup(extra: str) -> list[str]:
        """What pip is called with."""
        (tmp_path / "installed").write_text("")
        subprocess.run(["scripts/setup", *([extra] if extra else [])], cwd=tmp_path, check=True, capture_output=True)
        return (tmp_path / "installed").read_text().splitlines()

    if before is not None:
        setup(before)
    calls = setup(asked)
    assert bool(calls) == installs
    assert all(call.endswith(f"-e .[{asked}]" if asked else "-e .") for call in calls)

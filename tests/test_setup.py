"""scripts/setup installs what was asked for, and nothing twice."""

from __future__ import annotations

import os
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
        ("", "shell", True),
        ("shell", "", False),
        ("dev", "shell", False),
        ("shell", "dev", True),
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
        """Run scripts/setup; return the arguments that pip was called with."""
        (tmp_path / "installed").write_text("")
        subprocess.run(["scripts/setup", *([extra] if extra else [])], cwd=tmp_path, check=True, capture_output=True)
        return (tmp_path / "installed").read_text().splitlines()

    if before is not None:
        setup(before)
    calls = setup(asked)
    assert bool(calls) == installs
    assert all(call.endswith(f"-e .[{asked}]" if asked else "-e .") for call in calls)


def test_setup_prints_its_steps_and_fails_with_pip(tmp_path: Path) -> None:
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    said = ["Obtaining file:///x", "Collecting torch", "  Downloading torch-2.whl (203.1 MB)", "Collecting numpy"]
    said += [
        "  Using cached numpy-2.whl (15 MB)",
        "Requirement already satisfied: pip",
        "Installing collected packages: a, b",
    ]
    python.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said) + "exit $PIP_STATUS\n")
    python.chmod(0o755)
    for status in (0, 7):
        run = subprocess.run(
            ["scripts/setup", "dev"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PIP_STATUS": str(status)},
        )
        assert run.returncode == status
        assert (tmp_path / ".venv" / "minisgl-setup").is_file() == (status == 0)
        assert run.stderr.splitlines() == [
            "setup 2 of 3: getting the packages of Minisgl and its extra dev (a minute or two)",
            "  Downloading torch-2.whl (203.1 MB)",
            "  using cached numpy-2.whl (15 MB)",
            "setup 3 of 3: unpacking 2 packages (a minute or less)",
        ]
        (tmp_path / ".venv" / "minisgl-setup").unlink(missing_ok=True)

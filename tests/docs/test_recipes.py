"""docs/recipes.md: command lines are ours, figures those of docs/performance.md, and its arithmetic is right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from minisgl.cli import parse_args

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "recipes.md").read_text()
COMMANDS = re.findall(r"(?:`|^    )minisgl (--model[^`\n]+)", TEXT, re.MULTILINE)


def rows(heading: str) -> list[list[str]]:
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)[2:]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_is_a_command_line_of_ours(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.txt").write_text("a-key\n")
    config, _ = parse_args(shlex.split(command))
    assert config.source.model != "demo"


def test_figures_are_those_of_the_page_on_performance() -> None:
    known = set(re.findall(r"\d[\d,.]*\d|\d", (DOCS / "performance.md").read_text()))
    found = [figure for row in rows("By GPU") for figure in re.findall(r"\d[\d,.]*\d|\d", row[2])]
    assert len(found) > 10
    assert [figure for figure in found if figure not in known] == []


def test_the_table_of_sizes_adds_up() -> None:
    for model, billions, gigabytes, shape, kilobytes in rows("What fits"):
        layers, heads, size = map(int, shape.split(", "))
        assert float(gigabytes) == pytest.approx(2 * float(billions)), model
        assert int(kilobytes) * 1024 == 2 * 2 * layers * heads * size, model

"""The pages of docs/ show what the code really does: their programs are run, and print what the pages say."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import CodeType

import pytest

from minisgl.attention.base import AttentionBackend

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("[0-9]-*.md"))

# A program, and its output in the block of text after it, if it prints anything.
EXAMPLE = re.compile(
    r"^```python\n(?P<program>.*?)^```\n(?:\n*```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def printed_by(program: str | CodeType, names: dict[str, object] | None = None) -> list[str]:
    """Run a program with these global names, and return the lines that it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(program, {} if names is None else names)
    return lines(printed.getvalue())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_print_what_the_page_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": page.stem}  # a page's programs go on from one another
    examples = list(EXAMPLE.finditer(text))
    assert examples, "every page has a worked example"
    for example in examples:
        first_line = text.count("\n", 0, example.start("program"))
        program = compile("\n" * first_line + example["program"], str(page), "exec")
        assert printed_by(program, names) == lines(example["output"] or "")


def test_there_are_eight_pages() -> None:
    assert [page.stem[0] for page in PAGES] == list("12345678")


def test_the_backend_of_its_page_computes_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *_, self_test = EXAMPLE.finditer((DOCS / "extending" / "backend.md").read_text(encoding="utf-8"))
    (tmp_path / "dense.py").write_text(module["program"])
    monkeypatch.syspath_prepend(tmp_path)
    names = {name for name in vars(AttentionBackend) if not name.startswith("_")}
    assert names <= vars(import_module("dense").DenseAttention).keys()
    assert printed_by(f"from dense import DenseAttention\n{self_test['program']}") == lines(self_test["output"])


def test_a_program_of_vllm_runs() -> None:
    (program,) = EXAMPLE.finditer((DOCS / "from-vllm.md").read_text(encoding="utf-8"))
    (text,) = printed_by(program["program"])
    assert text

"""The pages of docs/ show what the code really does: their programs are run, and print what the pages say."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("[0-9]-*.md"))

# A program, and its output in the block of text after it, if it prints anything.
EXAMPLE = re.compile(
    r"^```python\n(?P<program>.*?)^```\n(?:\n*```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_print_what_the_page_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": page.stem}  # a page's programs go on from one another
    examples = list(EXAMPLE.finditer(text))
    assert examples, "every page has a worked example"
    for example in examples:
        first_line = text.count("\n", 0, example.start("program"))
        program = compile("\n" * first_line + example["program"], str(page), "exec")
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(program, names)
        assert lines(printed.getvalue()) == lines(example["output"] or "")


def test_there_are_eight_pages() -> None:
    assert [page.stem[0] for page in PAGES] == list("12345678")

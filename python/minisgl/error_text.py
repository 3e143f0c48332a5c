"""Parts of messages of one line: texts of other packages' errors, which may have several lines, and lists of names."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def in_one_line(error: Exception | str) -> str:
    """Return the whole text of an error, with a space in place of each line break or other white space."""
    return " ".join(str(error).split())


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the kind of an error without a text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def summary(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def abridged(names: list[str]) -> str:
    """Return the first name and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def file_error(path: Path, error: Exception) -> str:
    """Return why a model's file cannot be read: the error, or that it is what git leaves without its LFS extension."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            return "it is a Git LFS pointer; `git lfs pull` downloads the file"
    return str(error)

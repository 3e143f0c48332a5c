"""Panics of packages in Rust (`tokenizers`, `llguidance`), which are no Exception, as errors: they end no process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LibraryPanic(RuntimeError):
    """A package in Rust has panicked."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic as LibraryPanic."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 does not export it
            raise
        raise LibraryPanic(f"a library panicked: {error}") from error

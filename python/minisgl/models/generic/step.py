"""The step under way, for modules that are called without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minisgl.context import ForwardContext


@dataclass
class Step:
    """Holds the context of a model's forward while it runs: transformers' modules do not pass it down."""

    _ctx: ForwardContext | None = None

    @property
    def ctx(self) -> ForwardContext:
        if self._ctx is None:
            raise RuntimeError("no step is under way")
        return self._ctx

    @contextmanager
    def runs(self, ctx: ForwardContext) -> Iterator[None]:
        """Let modules see a step."""
        self._ctx = ctx
        try:
            yield
        finally:
            self._ctx = None

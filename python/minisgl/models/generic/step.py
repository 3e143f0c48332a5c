"""Context of the running step, for modules of transformers, which do not pass it down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minisgl.context import ForwardContext


@dataclass
class Step:
    """Holds the context of a model's forward while it runs."""

    _ctx: ForwardContext | None = None

    @property
    def ctx(self) -> ForwardContext:
        if self._ctx is None:
            raise RuntimeError("no step is under way")
        return self._ctx

    @contextmanager
    def runs(self, ctx: ForwardContext) -> Iterator[None]:
        """Give modules this context inside a `with` block."""
        self._ctx = ctx
        try:
            yield
        finally:
            self._ctx = None

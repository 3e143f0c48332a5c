"""Minisgl: a small, fast, readable LLM inference server with an OpenAI-compatible API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.sampling_params import Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, because every worker process imports this package and most must not load torch (PEP 562).
    if name == "LLM":
        from minisgl.llm import LLM

        return LLM
    if name in ("Grammar", "SamplingParams"):
        from minisgl import sampling_params

        return getattr(sampling_params, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

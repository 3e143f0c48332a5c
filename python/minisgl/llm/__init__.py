"""The offline interface: a model, a scheduler and an engine in the caller's process."""

from __future__ import annotations

from minisgl.core import SamplingParams
from minisgl.llm.llm import LLM

__all__ = ["LLM", "SamplingParams"]

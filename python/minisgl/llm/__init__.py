"""The offline interface: a model, a scheduler and an engine in the caller's process."""

from __future__ import annotations

from minisgl.llm.llm import LLM
from minisgl.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

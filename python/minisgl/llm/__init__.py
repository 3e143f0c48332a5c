"""The offline interface: a model, a scheduler and an engine in the caller's process.

`llm` is the class, whose settings `keywords` takes from the configuration. `params` completes the sampling parameters
of a call, `completion` assembles its answers, and `rank_processes` runs the other tensor-parallel ranks.
"""

from __future__ import annotations

from minisgl.llm.llm import LLM
from minisgl.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

"""Keywords of LLM: the declared settings of the model's source, the engine and the scheduler."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

import torch

from minisgl.config import EngineConfig, SchedulerConfig, SourceConfig
from minisgl.config.settings import declarations, take_keywords

_SETTINGS = (SourceConfig, EngineConfig, SchedulerConfig)  # settings that are keywords of LLM
# No client waits for a first token, and computing whole prompts first gives the largest decode batches soonest.
_OWN_DEFAULTS = {"batch_policy": "prefill-first", "schedule_policy": "fcfs"}


def signature() -> Signature:
    """Return LLM's signature with the declared settings by name, for `help` and for completion at a prompt."""
    keywords = [
        Parameter(
            one.keyword, Parameter.KEYWORD_ONLY, default=_OWN_DEFAULTS.get(one.name, one.default), annotation=one.hint
        )
        for struct in _SETTINGS
        for one in declarations(struct)
        if one.name not in ("model", "dtype")
    ]
    return Signature(
        [
            Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=str),
            Parameter("dtype", Parameter.POSITIONAL_OR_KEYWORD, default="auto", annotation=str | torch.dtype),
            Parameter("use_dummy_weight", Parameter.KEYWORD_ONLY, default=False, annotation=bool),
            *keywords,
        ]
    )


def read_settings(keywords: dict[str, Any]) -> tuple[SourceConfig, EngineConfig, SchedulerConfig]:
    """Return the settings given by LLM's keywords. TypeError for an unknown keyword."""
    source = SourceConfig(**take_keywords(SourceConfig, keywords))
    engine = EngineConfig(model_path="", **take_keywords(EngineConfig, keywords))
    scheduler = SchedulerConfig(**_OWN_DEFAULTS | take_keywords(SchedulerConfig, keywords))
    for keyword in keywords:
        raise TypeError(f"LLM has no keyword {keyword}; {_advice(keyword)}")
    return source, engine, scheduler


def _advice(keyword: str) -> str:
    """Return what to give in place of an unknown keyword: the one whose flag it names, or any of all."""
    declared = [one for kind in _SETTINGS for one in declarations(kind)]
    flag = f"--{keyword.replace('_', '-')}"
    for one in declared:
        if flag in (*one.flags, *one.setting.aliases):
            return f"give {one.keyword}" + (f"={not one.default}" if one.kind is bool else "")
        if flag in one.setting.switches:
            return f"give {one.keyword}={one.setting.switches[flag]!r}"
    return f"it has {', '.join(sorted(one.keyword for one in declared))}"

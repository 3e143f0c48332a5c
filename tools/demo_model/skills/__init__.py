"""The skills of the demo model. Each is a module with `generate(source) -> Case`; none imports torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from demo_model.case import Case
from demo_model.skills import (
    arithmetic,
    completion,
    copying,
    counting,
    json_answer,
    product,
    recall,
    spelling,
    thinking,
    tool_call,
    unknown,
    weekdays,
)
from demo_model.skills.setting import with_setting
from demo_model.source import Source

__all__ = ["SKILLS", "Case", "Source", "make_case"]

SKILLS: dict[str, Callable[[Source], Case]] = {
    "recall": recall.generate,
    "copy": copying.generate,
    "tools": tool_call.generate,
    "json": json_answer.generate,
    "product": product.generate,
    "arithmetic": arithmetic.generate,
    "counting": counting.generate,
    "weekdays": weekdays.generate,
    "spelling": spelling.generate,
    "thinking": thinking.generate,
    "unknown": unknown.generate,
    "completion": completion.generate,
}


def make_case(skill: str, seed: int, *, test: bool = True, context: int = 1900) -> Case:
    """Case number `seed` of a skill, from the test side of the split unless told otherwise.

    Facts to recall, and filler in a system prompt, are at most about `context` characters (tokens) long. Some
    cases come with a system prompt, with tools that do not fit, or after earlier turns.
    """
    source = Source(random.Random(f"{skill}/{seed}/{test}"), test=test, context=context)
    return replace(with_setting(source, SKILLS[skill](source)), skill=skill)

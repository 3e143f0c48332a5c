"""Think first when thinking is on; the question is of any other skill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from demo_model.case import Case
from demo_model.skills import recall, tool_call
from demo_model.skills.setting import SIMPLE
from demo_model.source import Source

_QUESTIONS: list[Callable[[Source], Case]] = [*SIMPLE, recall.generate, tool_call.generate]


def generate(source: Source) -> Case:
    """Half of the cases think; the others ask not to, explicitly or by leaving the switch alone."""
    case = source.pick(_QUESTIONS)(source)
    kwargs = source.pick([{"enable_thinking": True}, {"enable_thinking": True}, {"enable_thinking": False}, {}])
    return replace(case, skill="thinking", chat_template_kwargs=kwargs)

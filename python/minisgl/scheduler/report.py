"""Report of a step to the world: who entered, the tokens it brought, and who ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl.core import Int32Array
from minisgl.message.to_detokenizer import End
from minisgl.message.types import LogprobRows


@dataclass(frozen=True, slots=True)
class Entered:
    """A request has entered a slot, or ends without ever having done so: its tokens may come from now on."""

    seq_id: int
    cached_tokens: int  # of its prompt, found in the cache
    min_tokens: int  # no stop string ends it before


@dataclass(slots=True)
class StepReport:
    """Events since the last report, at most one step's end among them: one new token each for `seq_ids`."""

    entered: list[Entered] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    tokens: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    ended: list[End] = field(default_factory=list)
    logprobs: LogprobRows | None = None  # of the tokens, for those sequences that ask
    prompt_logprobs: list[LogprobRows] = field(default_factory=list)  # of a prompt each, all its positions at once

    def __bool__(self) -> bool:
        return bool(self.entered or self.seq_ids or self.ended)

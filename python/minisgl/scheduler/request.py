"""A request as the scheduler sees it, and the states it goes through.

```
WAITING --admitted--> RUNNING --ended--> FINISHED
   |                   |   ^                 ^
   |          retracted|   |readmitted       |
   |                   v   |                 |
   |                 RETRACTED --ended-------|
   +----------------------------ended--------+
```
A finished request still holds its slot and pages until the last step that names it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from minisgl.core import AnyArray, Int32Array, Logprobs, SamplingParams
from minisgl.kvcache.base import CacheHandle
from minisgl.message.types import TextOptions
from minisgl.structured_output.protocol import Matcher


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    RETRACTED = auto()  # waits again, with the tokens it has
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. While it has a slot, its lengths and tokens live in the SlotTable's row."""

    seq_id: int
    token_ids: Int32Array  # the prompt; after a retraction, the output so far as well
    sampling: SamplingParams  # max_tokens is resolved
    seed: int
    max_len: int  # tokens at which it must stop
    arrival: int  # a number that grows: who came first
    prompt_len: int
    text: TextOptions  # for the detokenizer, when it enters
    priority: int = 0  # larger goes first
    salt: bytes = b""  # shares prefixes with requests of the same salt only
    passed_over: int = 0  # times that a younger request of its priority was admitted before it
    state: RequestState = RequestState.WAITING
    slot: int = -1
    prefix: CacheHandle | None = None  # the locked place in the cache
    reserved_pages: int = 0  # promised for its known tokens at admission and not yet allocated
    prompt_scores: list[Logprobs[AnyArray]] = field(default_factory=list)  # of its tokens so far
    prompt_scored: bool = False  # nobody wants any, or all have been reported
    failures: int = 0  # small steps of this request alone, since its last token, that found too little memory
    matcher: Matcher | None = None  # stands behind its last known token, through retractions too

    @property
    def precedence(self) -> tuple[int, int]:
        """Smaller goes first, and is retracted last."""
        return -self.priority, self.arrival

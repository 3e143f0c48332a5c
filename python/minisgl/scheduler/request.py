"""A request as the scheduler sees it, and the states it goes through.

```
WAITING --admitted--> RUNNING --ended--> FINISHED
   \\------------------ended----------------^
```
A finished request still holds its slot and pages until the last step that names it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from minisgl.core import Int32Array, SamplingParams
from minisgl.kvcache.base import CacheHandle


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. While it has a slot, its lengths and tokens live in the SlotTable's row."""

    sequence: int
    prompt_ids: Int32Array
    sampling: SamplingParams  # max_tokens is resolved
    seed: int
    max_len: int  # tokens at which it must stop
    state: RequestState = RequestState.WAITING
    slot: int = -1
    prefix: CacheHandle | None = None  # the locked place in the cache
    reserved_pages: int = 0  # promised at admission and not yet allocated

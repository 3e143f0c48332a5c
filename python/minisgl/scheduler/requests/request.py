"""A request as the scheduler sees it, and the states that it goes through.

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
from typing import Literal, NamedTuple

from minisgl.core import AnyArray, Int32Array, Logprobs
from minisgl.kvcache.base import CacheHandle
from minisgl.message.engine_state import SequenceState
from minisgl.message.shared import TextOptions
from minisgl.sampling_params import SamplingParams
from minisgl.structured_output.protocol import Matcher


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    RETRACTED = auto()  # waits again, with the tokens it has
    FINISHED = auto()


STATE_NAMES: dict[RequestState, Literal["waiting", "running", "retracted"]] = {
    RequestState.WAITING: "waiting",
    RequestState.RUNNING: "running",
    RequestState.RETRACTED: "retracted",
}


class Awaited(NamedTuple):
    """Prefix that a running prefill will put into the cache, which a waiting request will use."""

    seq_id: int  # of the running request
    length: int  # tokens


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. While it has a slot, its lengths and tokens live in the SlotTable's row."""

    seq_id: int
    token_ids: Int32Array  # the prompt; after a retraction, the output so far as well
    sampling: SamplingParams  # max_tokens is resolved
    seed: int
    max_len: int  # number of tokens at which it must stop
    arrival: int  # prompt tokens that arrived before its own, which orders requests by arrival
    prompt_len: int
    text: TextOptions  # for the detokenizer, when it enters
    priority: int = 0  # larger goes first
    salt: bytes = b""  # prefixes are shared only between requests with the same salt
    request_id: str = ""  # id of the HTTP request, for logs
    passed_over: int = 0  # number of younger requests of its priority that were admitted before it
    awaited: Awaited | None = None  # what it waited for when it was last tried for admission
    state: RequestState = RequestState.WAITING
    slot: int = -1
    prefix: CacheHandle | None = None  # locked prefix in the cache
    reserved_pages: int = 0  # pages promised at admission for its known tokens and not yet allocated
    prompt_scores: list[Logprobs[AnyArray]] = field(default_factory=list)  # of its prompt's tokens so far
    prompt_scored: bool = False  # log-probabilities of the prompt are not wanted, or all have been reported
    hit_tokens: int = 0  # tokens found in the cache when it entered
    failures: int = 0  # small steps of it alone that ran out of memory since its last token
    matcher: Matcher | None = None  # has consumed all its known tokens, also after a retraction

    @property
    def precedence(self) -> tuple[int, int]:
        """Sort key: smaller goes first, and is retracted last."""
        return -self.priority, self.arrival

    @property
    def is_compiling(self) -> bool:
        """True if its grammar is still being compiled."""
        return self.matcher is not None and self.matcher.is_compiling

    def may_wait_for(self, other: Request) -> bool:
        """Return True if it may wait for a prefix that another one computes.

        One of lower priority may get no tokens for many steps: a long prompt and a flow of short ones may have all.
        """
        return other.salt == self.salt and other.priority >= self.priority


def sequence_state(request: Request, computed: int, known: int) -> SequenceState:
    """Return the state of a request for the glass box; `computed`: tokens with K and V, `known`: all tokens."""
    held = [] if request.prefix is None else request.prefix.pages[-1:].tolist()
    return SequenceState(
        seq_id=request.seq_id,
        request_id=request.request_id,
        state=STATE_NAMES[request.state],
        prompt=request.prompt_len,
        hit=request.hit_tokens,
        computed=computed,
        known=known,
        limit=request.max_len,
        priority=request.priority,
        node=held[0] if held else None,
    )

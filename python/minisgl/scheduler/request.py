"""A request as the scheduler sees it, the states it goes through, and the queue of those that wait.

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

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Literal

from minisgl.config.scheduler import SchedulePolicy
from minisgl.core import AnyArray, Int32Array, Logprobs, SamplingParams
from minisgl.kvcache.base import CacheHandle
from minisgl.message.engine_state import SequenceState
from minisgl.message.types import TextOptions
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


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. While it has a slot, its lengths and tokens live in the SlotTable's row."""

    seq_id: int
    token_ids: Int32Array  # the prompt; after a retraction, the output so far as well
    sampling: SamplingParams  # max_tokens is resolved
    seed: int
    max_len: int  # tokens at which it must stop
    arrival: int  # prompt tokens that came before its own: a number that grows
    prompt_len: int
    text: TextOptions  # for the detokenizer, when it enters
    priority: int = 0  # larger goes first
    salt: bytes = b""  # shares prefixes with requests of the same salt only
    request_id: str = ""  # id of the HTTP request, for logs
    passed_over: int = 0  # times that a younger request of its priority was admitted before it
    state: RequestState = RequestState.WAITING
    slot: int = -1
    prefix: CacheHandle | None = None  # the locked place in the cache
    reserved_pages: int = 0  # promised for its known tokens at admission and not yet allocated
    # Log-probabilities of its prompt's tokens so far.
    prompt_scores: list[Logprobs[AnyArray]] = field(default_factory=list)
    prompt_scored: bool = False  # nobody wants any, or all have been reported
    hit_tokens: int = 0  # found in the cache when it entered
    failures: int = 0  # small steps of this request alone, since its last token, that found too little memory
    matcher: Matcher | None = None  # stands behind its last known token, through retractions too

    @property
    def precedence(self) -> tuple[int, int]:
        """Smaller goes first, and is retracted last."""
        return -self.priority, self.arrival


def sequence_state(request: Request, computed: int, known: int) -> SequenceState:
    """Return what is told of a request that has so many tokens, and K and V of so many."""
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


MAX_PASSED = 32  # younger requests of the same priority that may be admitted before one
LOOKED_AT = 64  # requests at the head among which sjf and lpm choose
PATIENCE = 8  # times its own length, in tokens of shorter prompts, that a prompt lets pass under sjf


class WaitingQueue:
    """Requests that wait for a slot, in the order in which they should get one.

    Higher priority first, then who came first; a retracted request has kept its arrival and so comes before all that
    came after it. Under `lpm` (longest prefix match) the one with the most cached tokens is preferred, under `sjf`
    (shortest job first) the shorter prompt, within a bound: a prompt goes before another if their difference in length,
    times PATIENCE, is more than the tokens that came between them. So no flow of short prompts holds up a long one.
    Whatever the policy, a request that MAX_PASSED younger ones of its priority have passed over goes first from the
    next step on.

    Say prompts of 1,000, 500, 4,000 and 100 tokens come in this order. Their ranks are 0 + 8 x 1,000, 1,000 + 8 x 500,
    1,500 + 8 x 4,000 and 5,500 + 8 x 100: the second goes first, then the last, the first, and the longest.

    Taking from the head and adding at the tail are cheap.
    """

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=lambda waiting: waiting.precedence)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def is_overdue(self, request: Request) -> bool:
        """Return True if it is passed over no more, whatever it would gain by waiting."""
        return request.passed_over >= MAX_PASSED

    def candidates(self, is_ready: Callable[[Request], bool], cached_tokens: Callable[[Request], int]) -> list[Request]:
        """Return the requests to try for admission, best first."""
        head = list(islice(filter(is_ready, self._requests), LOOKED_AT))
        if self._policy == "fcfs" or len(head) < 2:
            return head

        def rank(request: Request) -> int:
            if self._policy == "sjf":
                return request.arrival + PATIENCE * request.prompt_len
            return -cached_tokens(request)

        def preference(request: Request) -> tuple[int, bool, int, int]:
            overdue = self.is_overdue(request)
            return -request.priority, not overdue, 0 if overdue else rank(request), request.arrival

        return sorted(head, key=preference)

    def admitted(self, request: Request) -> None:
        """Take the request out; older ones of its priority have been passed over."""
        self._requests.remove(request)
        for other in self._requests:
            if other.precedence >= request.precedence:
                break
            if other.priority == request.priority:
                other.passed_over += 1

"""The queue of requests that wait for a slot, in the order of --schedule-policy."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import islice

from minisgl.config.scheduler import SchedulePolicy
from minisgl.scheduler.requests.request import Request

MAX_PASSED = 32  # younger requests of the same priority that may be admitted before a request
LOOKED_AT = 64  # requests at the head of the queue among which sjf and lpm choose
PATIENCE = 8  # under sjf, a prompt lets shorter ones with this multiple of its own tokens go first


class WaitingQueue:
    """Requests that wait for a slot, in the order in which they should get one.

    Higher priority goes first, then earlier arrival; a retracted request keeps its arrival. Under `lpm` (longest prefix
    match) the request with the most cached tokens goes first, under `sjf` (shortest job first) the shorter prompt,
    within a bound: a prompt overtakes another if their difference in length, times PATIENCE, is more than the tokens
    that arrived between them. So no flow of short prompts starves a long one. Under any policy, a request that
    MAX_PASSED younger ones of its priority have overtaken goes first from the next step on.

    Say prompts of 1,000, 500, 4,000 and 100 tokens come in this order. Their ranks are 0 + 8 x 1,000, 1,000 + 8 x 500,
    1,500 + 8 x 4,000 and 5,500 + 8 x 100: the second goes first, then the last, the first, and the longest.
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
        """Return True if no other request may overtake it any more, even if it would gain by waiting."""
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
        """Remove an admitted request, and count that it has overtaken the older ones of its priority."""
        self._requests.remove(request)
        for other in self._requests:
            if other.precedence >= request.precedence:
                break
            if other.priority == request.priority:
                other.passed_over += 1

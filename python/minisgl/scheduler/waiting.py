"""The requests that wait for a slot, in the order in which they should get one.

Higher priority first, then who came first; a retracted request has kept its arrival and so comes before all that came
after it. Under `lpm` (longest prefix match) the one with the most cached tokens is preferred. Whatever the policy, a
request that MAX_PASSED younger ones of its priority have passed over goes first from the next step on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import islice

from minisgl.config import SchedulePolicy
from minisgl.scheduler.request import Request

MAX_PASSED = 16  # younger requests of the same priority that may be admitted before one
LOOKED_AT = 64  # requests at the head among which lpm chooses


class WaitingQueue:
    """Ordered; taking from the head and adding at the tail are cheap."""

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
        """It is passed over no more, whatever it would gain by waiting."""
        return request.passed_over >= MAX_PASSED

    def candidates(self, is_ready: Callable[[Request], bool], cached_tokens: Callable[[Request], int]) -> list[Request]:
        """The requests to try for admission, best first."""
        head = list(islice(filter(is_ready, self._requests), LOOKED_AT))
        if self._policy == "fcfs" or len(head) < 2:
            return head
        cached = {request.seq_id: cached_tokens(request) for request in head}

        def preference(request: Request) -> tuple[int, bool, int, int]:
            overdue = self.is_overdue(request)
            return -request.priority, not overdue, 0 if overdue else -cached[request.seq_id], request.arrival

        return sorted(head, key=preference)

    def admitted(self, request: Request) -> None:
        """Take the request out; older ones of its priority have been passed over."""
        self._requests.remove(request)
        for other in self._requests:
            if other.precedence >= request.precedence:
                break
            if other.priority == request.priority:
                other.passed_over += 1

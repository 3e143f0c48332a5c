"""Order in which a tokenizer worker handles what clients have sent: the client that has used the least time goes first.

One prompt may take two seconds, and a client may send thousands. The others wait for the one that is being handled, and
not for all that came before theirs. Each client's own are handled in the order in which they came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

MAX_IDLE = 4096  # clients without waiting items whose time is remembered

T = TypeVar("T")


class Turns(Generic[T]):
    """Items that wait, each under a key of its own."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, T]] = {}  # by client that has any, in order of arrival
        self._clients: dict[int, str] = {}  # client of each waiting item
        self._least = 0.0  # time that the client of the last turn had used before it; no waiting client has used less
        # Heap of the time used by each client that has used at least as much. One that sends a prompt after the other
        # would otherwise start anew with each. The number keeps the order of clients that have used the same.
        self._order: list[tuple[float, int, str]] = []
        self._known: set[str] = set()  # clients in `_order`, and that of the turn
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._clients)

    def add(self, key: int, client: str, item: T) -> None:
        """Add an item. A client that has used less than all others starts like them: it earns nothing by idleness."""
        if client not in self._known:
            self._known.add(client)
            heappush(self._order, (self._least, next(self._numbers), client))
        self._waiting.setdefault(client, {})[key] = item
        self._clients[key] = client

    def remove(self, keys: Iterable[int]) -> None:
        """Remove the items that still wait under these keys."""
        for key in keys:
            if key in self._clients:
                self._take(self._clients[key], key)

    def next(self) -> tuple[str, T]:
        """Return the client whose turn it is and its oldest item, which must be charged afterwards."""
        self._least, _, client = heappop(self._order)
        while client not in self._waiting:
            self._known.remove(client)
            self._least, _, client = heappop(self._order)
        return client, self._take(client, next(iter(self._waiting[client])))

    def charge(self, client: str, seconds: float) -> None:
        """Record the time that the client's item has taken, after its turn. Once nobody waits, all start anew."""
        heappush(self._order, (self._least + seconds, next(self._numbers), client))
        if not self._waiting:
            self._order.clear()
            self._known.clear()
        elif len(self._order) > len(self._waiting) + MAX_IDLE:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget the time used by clients that have nothing waiting: when they come again, they start anew.

        `next` forgets most of them, but none while each turn's client is new, as in a flow of prompts from everywhere.
        """
        self._order = [entry for entry in self._order if entry[2] in self._waiting]
        heapify(self._order)
        self._known = set(self._waiting)

    def _take(self, client: str, key: int) -> T:
        del self._clients[key]
        item = self._waiting[client].pop(key)
        if not self._waiting[client]:
            del self._waiting[client]
        return item

"""Queue of new grammars to try, fair to clients. Pure: no clock, no processes.

A grammar may use up its whole time limit, and a client may send many. So at most two grammars of a client are under way
at a time: one, and one more that looks cheap, because users who share an address or a key are not all hostile. Among
the others that may start, cheaper ones go first, then those of clients that have used less time, then the oldest. Every
`OLDEST_TURNS`-th turn takes the oldest one in any case, so that none waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from minisgl.sampling_params import Grammar

OLDEST_TURNS = 8
CHEAP = 16_384  # `estimated_cost` of a grammar that takes some 50 ms
MAX_WAITING_CHARS = 64 * 2**20  # of all waiting grammars together
MAX_CLIENT_CHARS = 8 * 2**20  # of the waiting grammars of one client
ENTRY_CHARS = 1024  # counted for each item in addition to its text
_MAX_COST = 10**12

_COUNTS = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
# A string without an end reaches to the text's, so that many of them are read once.
_STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.?)*+"?|\d{1,9}', re.DOTALL)

T = TypeVar("T", bound=Hashable)


class QueueFull(Exception):
    """Too many grammars wait, in all or of this client."""


@dataclass(slots=True)
class _Waiting:
    clients: set[str]  # clients that want it
    cost: int
    chars: int
    charged: str  # client against whose MAX_CLIENT_CHARS it counts

    @property
    def is_cheap(self) -> bool:
        return self.cost <= CHEAP


class CompileQueue(Generic[T]):
    """Items that wait or are under way. Several clients may want the same item."""

    def __init__(self) -> None:
        self._waiting: dict[T, _Waiting] = {}  # in order of arrival
        self._running: dict[T, tuple[str, bool]] = {}  # the client that is charged, and True if it is cheap
        self._seconds: dict[str, float] = {}  # time used by each client that has an item here
        self._chars: dict[str, int] = {}  # characters of waiting items, by client
        self._turns = 0

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._waiting)

    def add(self, item: T, client: str, *, cost: int, chars: int) -> None:
        """Add an item for a client; other clients may already wait for it. QueueFull if there is no room."""
        if item in self._waiting:
            self._waiting[item].clients.add(client)
        else:
            chars += ENTRY_CHARS
            of_client = self._chars.get(client, 0) + chars
            if of_client > MAX_CLIENT_CHARS or sum(self._chars.values()) + chars > MAX_WAITING_CHARS:
                raise QueueFull("too many grammars wait to be checked")
            self._chars[client] = of_client
            self._waiting[item] = _Waiting({client}, cost, chars, client)
        self._seconds.setdefault(client, 0.0)

    def remove(self, item: T) -> None:
        """Remove a waiting item that no client wants any more; an item under way is not stopped."""
        if item in self._waiting:
            self._forget(self._take(item))

    def next(self) -> T | None:
        """Return the item to try now; None if no waiting item has a client that is free."""
        busy: dict[bool, set[str]] = {True: set(), False: set()}  # clients with a cheap item, and with another
        for client, is_cheap in self._running.values():
            busy[is_cheap].add(client)
        free: dict[T, set[str]] = {}  # by item: its clients that are free
        for item, waiting in self._waiting.items():
            if clients := waiting.clients - busy[waiting.is_cheap]:
                free[item] = clients
        if not free:
            return None
        self._turns += 1
        is_oldests = self._turns % OLDEST_TURNS == 0
        item = next(iter(free)) if is_oldests else min(free, key=lambda one: self._place(one, free[one]))
        waiting = self._take(item)
        self._running[item] = min(free[item], key=self._used), waiting.is_cheap
        self._forget(waiting)
        return item

    def finish(self, item: T, seconds: float) -> None:
        """Record that an item has been tried, and charge its client the seconds."""
        client, _ = self._running.pop(item)
        if client in self._seconds:
            self._seconds[client] += seconds
        self._forget_client(client)

    def _place(self, item: T, clients: set[str]) -> tuple[int, float]:
        """Return the sort key of a waiting item: the smallest goes first. Costs count by their order of magnitude."""
        magnitude = max(self._waiting[item].cost.bit_length() - CHEAP.bit_length(), 0)
        return magnitude, min(map(self._used, clients))

    def _used(self, client: str) -> float:
        return self._seconds.get(client, 0.0)

    def _take(self, item: T) -> _Waiting:
        waiting = self._waiting.pop(item)
        self._chars[waiting.charged] -= waiting.chars
        if not self._chars[waiting.charged]:
            del self._chars[waiting.charged]
        return waiting

    def _forget(self, waiting: _Waiting) -> None:
        for client in waiting.clients:
            self._forget_client(client)

    def _forget_client(self, client: str) -> None:
        """Drop the seconds of a client that has no item here any more."""
        is_waiting = any(client in waiting.clients for waiting in self._waiting.values())
        if not is_waiting and all(client != running for running, _ in self._running.values()):
            self._seconds.pop(client, None)


def estimated_cost(grammar: Grammar) -> int:
    """Return the number of a grammar's characters if its repetitions were written out, each nested in the others.

    The time is proportional to the text's length. In a schema each string is counted separately, and numbers are added.
    """
    if grammar.kind not in ("json_schema", "closed_json_schema"):
        return _written_out(grammar.text)
    cost = 0
    for found in _STRING_OR_NUMBER.findall(grammar.text):
        cost += _written_out(found) if found[0] == '"' else int(found)
    return min(cost, _MAX_COST)


def _written_out(text: str) -> int:
    cost = len(text)
    for least, most in _COUNTS.findall(text):
        cost = min(cost * max(int(least), int(most or 0), 1), _MAX_COST)
    return cost

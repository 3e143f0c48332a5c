"""Queue of new grammars to try, fair to clients. Pure: no clock, no processes.

A grammar may take all the time that it is given, and a client may send many of them. So one grammar of a client is
under way at a time, and beside it one that is cheap to all appearance, because not all who share an address or a key
are hostile; the others of the client wait. Of what may go, the cheap goes first, then what is of a client that has used
less time, then what came first. Every `OLDEST_TURNS`-th turn is the oldest one's, so that all get theirs.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from minisgl.core import Grammar

OLDEST_TURNS = 8
CHEAP = 16_384  # value of `estimated_cost` that takes some 50 ms
MAX_WAITING_CHARS = 64 * 2**20  # all waiting grammars together
MAX_CLIENT_CHARS = 8 * 2**20  # waiting grammars of one client
ENTRY_CHARS = 1024  # counted for an item besides its text
_MAX_COST = 10**12

_COUNTS = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|\d{1,9}')

T = TypeVar("T", bound=Hashable)


class QueueFull(Exception):
    """Too much waits already, in all or of this client."""


@dataclass(slots=True)
class _Waiting:
    clients: set[str]  # clients that ask for it
    cost: int
    chars: int
    charged: str  # the client whose share of the memory it takes

    @property
    def is_cheap(self) -> bool:
        return self.cost <= CHEAP


class CompileQueue(Generic[T]):
    """Items that wait or are under way. Several clients may ask for one item."""

    def __init__(self) -> None:
        self._waiting: dict[T, _Waiting] = {}  # in the order that they came
        self._running: dict[T, tuple[str, bool]] = {}  # with the client whose turn it is; whether it is cheap
        self._seconds: dict[str, float] = {}  # used by each client that has an item here
        self._chars: dict[str, int] = {}  # waiting, by client
        self._turns = 0

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    def add(self, item: T, client: str, *, cost: int, chars: int) -> None:
        """Add an item for a client; it may wait already, for others. QueueFull if there is no room for it."""
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
        """Drop an item that nobody asks for any more; one that is under way goes on."""
        if item in self._waiting:
            self._forget(self._take(item))

    def next(self) -> T | None:
        """Take the item that is to be tried now; None if none waits whose client is free."""
        busy: dict[bool, set[str]] = {True: set(), False: set()}  # clients with a cheap one, and with another
        for client, is_cheap in self._running.values():
            busy[is_cheap].add(client)
        free: dict[T, set[str]] = {}  # the clients who may have their turn with it
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
        """Take note that an item has been tried, and charge its client the seconds."""
        client, _ = self._running.pop(item)
        if client in self._seconds:
            self._seconds[client] += seconds
        self._forget_client(client)

    def _place(self, item: T, clients: set[str]) -> tuple[int, float]:
        """Rank of an item that waits: the smallest goes first. Costs count by their order of magnitude."""
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
        """Forget the seconds of a client that has no item here any more."""
        is_waiting = any(client in waiting.clients for waiting in self._waiting.values())
        if not is_waiting and all(client != running for running, _ in self._running.values()):
            self._seconds.pop(client, None)


def estimated_cost(grammar: Grammar) -> int:
    """Count a grammar's characters once its repetitions are written out as if each stood within the others.

    It takes a time in proportion to the text. In a schema each string is looked at by itself, and numbers are added.
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

"""Order in which a tokenizer worker handles what clients have sent: the client that has used the least time goes first.

One prompt may take two seconds, and a client may send thousands. The others wait for the one that is being handled, and
not for all that came before theirs. Each client's own are handled in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Items that wait, each under a key of its own."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, T]] = {}  # by client that has any, in order of arrival
        self._clients: dict[int, str] = {}  # client of each waiting item
        self._seconds: dict[str, float] = {}  # time used by each client that has a waiting item, or the last turn

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._clients)

    def add(self, key: int, client: str, item: T) -> None:
        """Add an item. A client without others starts with the least time of all: it earns nothing by idleness."""
        self._seconds.setdefault(client, min(self._seconds.values(), default=0.0))
        self._waiting.setdefault(client, {})[key] = item
        self._clients[key] = client

    def remove(self, keys: Iterable[int]) -> None:
        """Remove the items that still wait under these keys."""
        for key in keys:
            if key in self._clients:
                client = self._clients[key]
                self._take(client, key)
                self._forget(client)

    def next(self) -> tuple[str, T]:
        """Return the client whose turn it is and its oldest item, which must be charged afterwards."""
        client = min(self._waiting, key=self._seconds.__getitem__)
        return client, self._take(client, next(iter(self._waiting[client])))

    def charge(self, client: str, seconds: float) -> None:
        """Record the time that the client's item has taken."""
        self._seconds[client] += seconds
        self._forget(client)

    def _take(self, client: str, key: int) -> T:
        del self._clients[key]
        item = self._waiting[client].pop(key)
        if not self._waiting[client]:
            del self._waiting[client]
        return item

    def _forget(self, client: str) -> None:
        """Forget the time of a client that has nothing here any more."""
        if client not in self._waiting:
            self._seconds.pop(client, None)

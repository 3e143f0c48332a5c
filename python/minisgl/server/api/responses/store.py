"""Stores responses in a SQLite file, each for the owner of the key that requested it.

All access to the file is in one thread, so that a slow disk delays only the requests that wait for it. The file's
responses are bounded in bytes: the oldest make room. A response names the previous one of its conversation; the items
of a conversation are collected along that chain.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import msgspec

from minisgl.config import ConfigError, HttpConfig
from minisgl.server.api.bodies.read_body import MAX_ITEMS, BodyScan
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.responses.body import Item

T = TypeVar("T")

# Id of an output item, or with an `i` of an input item; the 32 digits are its response's.
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_i?[0-9]{1,6}")
VERSION = 1  # version of the tables, in the file's user_version
BUSY_SECONDS = 10.0  # to wait while another process writes the same file
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    previous TEXT,
    bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    response BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_bytes ON responses (bytes);
"""


class TooMuchStored(Exception):
    """A request needs more bytes or values of the store than may be read for one request."""


class MissingResponse(Exception):
    """The owner has no response with this `id`."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


@dataclass(frozen=True, slots=True)
class Entry:
    """Response as it is stored, with its own input."""

    id: str
    owner: str
    previous: str | None
    input: bytes  # JSON: list of items that have ids
    response: bytes  # JSON: Response object


class ResponseStore:
    """Open file of responses."""

    def __init__(self, path: str, max_bytes: int, *, max_read_bytes: int) -> None:
        """Open the file, or create it readable for this user alone; ConfigError if it cannot be used.

        The store keeps at most `max_bytes`. For one request it reads at most `max_read_bytes`, and as many values as a
        request's body may have.
        """
        self._max_bytes = max_bytes
        self._max_read_bytes = max_read_bytes
        self._thread = ThreadPoolExecutor(1, "response-store")
        self._database = self._thread.submit(_open, path).result()

    async def put(self, entry: Entry) -> None:
        """Store a response, and delete the oldest if there is no room."""
        await self._run(lambda: self._put(entry))

    async def get(self, id: str, owner: str) -> Entry:
        """Return a response; MissingResponse if the owner has none with this id."""
        return await self._run(lambda: self._get(id, owner))

    async def delete(self, id: str, owner: str) -> None:
        """Delete a response; MissingResponse if the owner has none with this id."""
        await self._run(lambda: self._delete(id, owner))

    async def conversation(self, id: str, owner: str) -> list[Item]:
        """Return input and output items of a response and of all before it in its conversation, oldest first.

        MissingResponse if one of the responses is missing; TooMuchStored.
        """
        return await self._run(lambda: self._items(self._chain(id, owner), outputs_of_all=True))

    async def input(self, id: str, owner: str) -> list[Item]:
        """Return the items that a response has answered: its `conversation` without its own output."""
        return await self._run(lambda: self._items(self._chain(id, owner), outputs_of_all=False))

    async def find(self, item_ids: Iterable[str], owner: str) -> dict[str, Item]:
        """Return the items with these ids that are stored; TooMuchStored."""
        return await self._run(lambda: self._find(set(item_ids), owner))

    def close(self) -> None:
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # Run in the thread.

    def _put(self, entry: Entry) -> None:
        size = len(entry.input) + len(entry.response)
        if size > self._max_bytes:
            return
        row = (entry.id, entry.owner, entry.previous, size, entry.input, entry.response)
        with self._database as database:
            database.execute(
                "INSERT INTO responses (id, owner, previous, bytes, input, response) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            surplus = database.execute("SELECT sum(bytes) FROM responses").fetchone()[0] - self._max_bytes
            oldest = database.execute("SELECT number, bytes FROM responses ORDER BY number") if surplus > 0 else ()
            last = 0
            for number, size in oldest:
                last, surplus = number, surplus - size
                if surplus <= 0:
                    break
            if last:
                database.execute("DELETE FROM responses WHERE number <= ?", (last,))

    def _get(self, id: str, owner: str) -> Entry:
        row = self._database.execute(
            "SELECT id, owner, previous, input, response FROM responses WHERE id = ? AND owner = ?", (id, owner)
        ).fetchone()
        if row is None:
            raise MissingResponse(id)
        return Entry(*row)

    def _delete(self, id: str, owner: str) -> None:
        with self._database as database:
            found = database.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount
        if not found:
            raise MissingResponse(id)

    def _chain(self, id: str, owner: str) -> Iterator[Entry]:
        """Yield a response and all before it in its conversation, newest first."""
        following: str | None = id
        while following is not None:
            entry = self._get(following, owner)
            yield entry
            following = entry.previous

    def _find(self, item_ids: Set[str], owner: str) -> dict[str, Item]:
        matches = [match for match in map(ITEM_ID.fullmatch, item_ids) if match is not None]
        entries: list[Entry] = []
        for response in dict.fromkeys(f"resp_{match[1]}" for match in matches):
            with suppress(MissingResponse):
                entries.append(self._get(response, owner))
        items = self._items(iter(entries), outputs_of_all=True)
        return {item["id"]: item for item in items if item["id"] in item_ids}

    def _items(self, entries: Iterator[Entry], *, outputs_of_all: bool) -> list[Item]:
        """Return the items of entries, which come newest first; the newest one's output only if `outputs_of_all`."""
        size, scan = 0, BodyScan(MAX_ITEMS)
        found: list[list[Item]] = []
        for number, entry in enumerate(entries):
            size += len(entry.input) + len(entry.response)
            if size > self._max_read_bytes:
                raise TooMuchStored
            try:
                scan.feed(entry.input)
                scan.feed(entry.response)
            except ApiError:
                raise TooMuchStored from None
            items: list[Item] = msgspec.json.decode(entry.input)
            found.append(items + msgspec.json.decode(entry.response)["output"] if number or outputs_of_all else items)
        return list(chain.from_iterable(reversed(found)))


def open_store(http: HttpConfig) -> ResponseStore | None:
    """Return the store of --response-store, if given; ConfigError if it cannot be used."""
    if http.response_store is None:
        return None
    return ResponseStore(http.response_store, http.response_store_bytes, max_read_bytes=http.max_body_bytes)


def _open(path: str) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(path, timeout=BUSY_SECONDS)
        version = database.execute("PRAGMA user_version").fetchone()[0]
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version != VERSION and (version or tables):
            raise ConfigError(f"--response-store {path} is not a file of this server's responses")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the last responses only
        database.execute("PRAGMA secure_delete = ON")
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {VERSION}")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--response-store {path} cannot be used: {error}") from None
    return database

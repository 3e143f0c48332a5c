"""Stores responses in a SQLite file, each for the owner of the key that requested it.

All access to the file is in one thread, so that a slow disk delays only the requests that wait for it. The file's
responses are bounded in bytes: the oldest of the owner who stores most make room, so that no owner pushes out those of
another who stores less. A response names the previous one of its conversation; the items of a conversation are
collected along that chain.

A disk may fill up and a file may be deleted while the server runs. The open file is used as long as it is the one at
the path; otherwise the next access creates it anew. A failure is logged once, until responses can be stored again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

import msgspec

from minisgl.config import ConfigError, HttpConfig
from minisgl.server.api.bodies.read_body import MAX_ITEMS, BodyScan
from minisgl.server.api.http.errors import ApiError, store_failed
from minisgl.server.api.responses.body import Item

logger = logging.getLogger(__name__)

T = TypeVar("T")
Hold = Callable[[int], None]  # counts bytes that a request holds in memory, and raises if all requests hold too many

# Id of an output item, or with an `i` of an input item; the 32 digits are its response's.
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(i?)[0-9]{1,6}")
VERSION = 1  # version of the tables, in the file's user_version
READ_FACTOR = 8  # bytes that may be read for each byte of a conversation: its responses repeat their tools
BUSY_SECONDS = 10.0  # to wait while another process writes the same file
# Each owner's total is kept by triggers: adding up a million responses takes 40 ms, for each one that is stored.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    previous TEXT,
    bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    response BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_of_owner ON responses (owner);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO owners SELECT owner, sum(bytes) FROM responses WHERE NOT EXISTS (SELECT 1 FROM owners) GROUP BY owner;
CREATE TRIGGER IF NOT EXISTS owner_stored AFTER INSERT ON responses BEGIN
    INSERT INTO owners VALUES (NEW.owner, NEW.bytes) ON CONFLICT (owner) DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS owner_deleted AFTER DELETE ON responses BEGIN
    UPDATE owners SET bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
END;
COMMIT;
"""
# Owner with the most bytes, if it has more than the new response, and the number of owners. It frees its share of what
# is too much, and so never has less than others afterwards; few queries are needed if the limit has become smaller.
_LARGEST_OWNER = """
SELECT owner, count(*) OVER () FROM owners WHERE bytes > (owner = ?) * ? ORDER BY bytes DESC LIMIT 1
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

    @property
    def size(self) -> int:
        return len(self.input) + len(self.response)


class ResponseStore:
    """Open file of responses. Every access may raise the ApiError `store_failed`, after the failure is logged.

    What is read is counted by `hold` before more is read: a short request may refer to as much as a body may have.
    """

    def __init__(self, path: str, max_bytes: int, *, max_read_bytes: int) -> None:
        """Open the file, or create it readable for this user alone; ConfigError if it cannot be used.

        The store keeps at most `max_bytes`. For one request it returns at most `max_read_bytes`, and as many values as
        a request's body may have.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._max_read_bytes = max_read_bytes
        self._thread = ThreadPoolExecutor(1, "response-store")
        self._reading = asyncio.Lock()
        try:
            self._database = self._thread.submit(_open, path).result()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--response-store {path} cannot be used: {error}") from None
        self._file = _identity(path)  # file that is open
        self._is_failing = False  # the last access failed, or the last write if there were only reads since

    async def put(self, entry: Entry) -> bool:
        """Store a response, and delete old ones if there is no room; return False if it is larger than `max_bytes`.

        It is stored entirely or, after an error, not at all.
        """
        if entry.size > self._max_bytes:
            return False
        await self._run(lambda: self._put(entry))
        return True

    async def get(self, id: str, owner: str, hold: Hold) -> Entry:
        """Return a response; MissingResponse if the owner has none with this id."""

        def get() -> tuple[Entry, int]:
            entry = self._get(id, owner)
            return entry, entry.size

        return await self._read(get, hold, id)

    async def delete(self, id: str, owner: str) -> None:
        """Delete a response; MissingResponse if the owner has none with this id."""
        await self._run(lambda: self._delete(id, owner), id)

    async def conversation(self, id: str, owner: str, hold: Hold) -> list[Item]:
        """Return input and output items of a response and of all before it in its conversation, oldest first.

        MissingResponse if one of the responses is missing; TooMuchStored.
        """
        return await self._read(lambda: self._conversation(id, owner, with_output=True), hold, id)

    async def input(self, id: str, owner: str, hold: Hold) -> list[Item]:
        """Return the items that a response has answered: its `conversation` without its own output."""
        return await self._read(lambda: self._conversation(id, owner, with_output=False), hold, id)

    async def find(self, item_ids: Iterable[str], owner: str, hold: Hold) -> dict[str, Item]:
        """Return the items with these ids that are stored; TooMuchStored, for which an item counts each time."""
        return await self._read(lambda: self._find(Counter(item_ids), owner), hold)

    def close(self) -> None:
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    async def _read(self, read: Callable[[], tuple[T, int]], hold: Hold, id: str | None = None) -> T:
        """Return what `read` returns with its number of bytes, once they are counted."""
        async with self._reading:
            found, num_bytes = await self._run(read, id)
            hold(num_bytes)
        return found

    async def _run(self, call: Callable[[], T], id: str | None = None) -> T:
        """Return what a call returns in the thread; `id` is the response that it is about, if it is about one."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._access, call, id)

    # Run in the thread.

    def _access(self, call: Callable[[], T], id: str | None) -> T:
        try:
            if _identity(self._path) != self._file:
                self._reopen()
            return call()
        except (OSError, sqlite3.Error) as error:
            if not self._is_failing:
                self._is_failing = True
                logger.error("--response-store %s cannot be used, so responses are not stored: %s", self._path, error)
            if id is not None and isinstance(error, FileNotFoundError):  # the file is gone together with its folder
                raise MissingResponse(id) from None
            raise store_failed() from error

    def _reopen(self) -> None:
        """Open the file that is now at the path, or create it."""
        database = _open(self._path)
        with suppress(sqlite3.Error):
            self._database.close()
        self._database, self._file = database, _identity(self._path)
        logger.warning("--response-store %s was deleted or replaced, and has been opened anew", self._path)

    def _put(self, entry: Entry) -> None:
        row = (entry.id, entry.owner, entry.previous, entry.size, entry.input, entry.response)
        with self._database as database:
            number = database.execute(
                "INSERT INTO responses (id, owner, previous, bytes, input, response) VALUES (?, ?, ?, ?, ?, ?)", row
            ).lastrowid
            surplus = database.execute("SELECT sum(bytes) FROM owners").fetchone()[0] - self._max_bytes
            while surplus > 0:
                owner, num_owners = database.execute(_LARGEST_OWNER, (entry.owner, entry.size)).fetchone()
                surplus -= self._delete_oldest(owner, -(-surplus // num_owners), number)
        if self._is_failing:
            self._is_failing = False
            logger.warning("--response-store %s can be used again", self._path)

    def _delete_oldest(self, owner: str, wanted: int, before: int | None) -> int:
        """Delete an owner's oldest responses until they have `wanted` bytes; return how many they had.

        Only responses with numbers below `before` are deleted.
        """
        query = "SELECT number, bytes FROM responses WHERE owner = ? AND number < ? ORDER BY number"
        freed = 0
        # SQLite does not copy its log into the file at a commit during which a query is open, so the log would grow.
        with closing(self._database.execute(query, (owner, before))) as oldest:
            for number, size in oldest:
                last, freed = number, freed + size
                if freed >= wanted:
                    break
        self._database.execute("DELETE FROM responses WHERE owner = ? AND number <= ?", (owner, last))
        return freed

    def _get(self, id: str, owner: str) -> Entry:
        row = self._database.execute(
            "SELECT id, owner, previous, input, response FROM responses WHERE id = ? AND owner = ?", (id, owner)
        ).fetchone()
        if row is None:
            raise MissingResponse(id)
        return Entry(*row)

    def _delete(self, id: str, owner: str) -> None:
        self._get(id, owner)  # a file that cannot be written can still tell that the response is missing
        with self._database as database:
            database.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner))

    def _conversation(self, id: str, owner: str, *, with_output: bool) -> tuple[list[Item], int]:
        """Return the items of a conversation up to a response, with or without its own output, and their bytes.

        Only inputs and outputs count against the limits.
        """
        bound = _ReadBound(self._max_read_bytes)
        found: list[list[Item]] = []  # items of each response, newest first
        following: str | None = id
        while following is not None:
            entry = self._get(following, owner)
            bound.read(entry.size)
            bound.add(entry.input)
            output = _output_of(entry.response)
            bound.add(output)
            items: list[Item] = msgspec.json.decode(entry.input)
            found.append(items + msgspec.json.decode(output) if found or with_output else items)
            following = entry.previous
        return list(chain.from_iterable(reversed(found))), bound.num_bytes

    def _find(self, item_ids: Mapping[str, int], owner: str) -> tuple[dict[str, Item], int]:
        """Return the items with these ids and their bytes; `item_ids` has how often each is wanted."""
        matches = [match for match in map(ITEM_ID.fullmatch, item_ids) if match is not None]
        found: dict[str, Item] = {}
        bound = _ReadBound(self._max_read_bytes)
        for response, is_input in dict.fromkeys((f"resp_{match[1]}", bool(match[2])) for match in matches):
            data = self._part(response, owner, "input" if is_input else "response")
            bound.read(len(data))
            for item in msgspec.json.decode(data if is_input else _output_of(data), type=list[msgspec.Raw]):
                id = msgspec.json.decode(item, type=_Identified).id
                if isinstance(id, str) and id in item_ids:
                    # A short list of references to one large item would otherwise become a conversation of any size.
                    for _ in range(item_ids[id]):
                        bound.add(item)
                    found[id] = msgspec.json.decode(item)
        return found, bound.num_bytes

    def _part(self, id: str, owner: str, column: Literal["input", "response"]) -> bytes:
        """Return input or output of a response, or one without items if the owner has no such response.

        A client that refers to earlier items does so in each request, so each stored input has the whole conversation.
        It is read only for items of its own: all inputs together grow with the square of the conversation's length.
        """
        query = f"SELECT {column} FROM responses WHERE id = ? AND owner = ?"
        row = self._database.execute(query, (id, owner)).fetchone()
        if row is None:
            return b"[]" if column == "input" else b'{"output":[]}'
        part: bytes = row[0]
        return part


class _Output(msgspec.Struct):
    """Part of a stored response that belongs to a conversation: the tools and instructions around it do not."""

    output: msgspec.Raw


class _Identified(msgspec.Struct):
    """Id of a stored item, which is what a client has sent if it gave one."""

    id: Any


def _output_of(response: bytes) -> bytes:
    """Return the output items of a response, as JSON, without log-probabilities.

    A model does not see these, and they have up to a hundred times as many values as the text.
    """
    items = msgspec.json.decode(msgspec.json.decode(response, type=_Output).output, type=list[dict[str, msgspec.Raw]])
    for item in items:
        if bytes(item.get("content", b"")).startswith(b"["):
            parts = msgspec.json.decode(item["content"], type=list[dict[str, msgspec.Raw]])
            for part in parts:
                if "logprobs" in part:
                    part["logprobs"] = msgspec.Raw(b"[]")
            item["content"] = msgspec.Raw(msgspec.json.encode(parts))
    return msgspec.json.encode(items)


class _ReadBound:
    """Counts the bytes and values of JSON that is read for one request, as those of its body are counted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_read = 0
        self.num_bytes = 0
        self._scan = BodyScan(MAX_ITEMS)

    def read(self, num_bytes: int) -> None:
        """Count bytes that are read from the file, with tools and instructions that are left out."""
        self._num_read += num_bytes
        if self._num_read > READ_FACTOR * self._max_bytes:
            raise TooMuchStored

    def add(self, data: bytes | msgspec.Raw) -> None:
        """Count a JSON value; TooMuchStored if there are more bytes or values than allowed."""
        data = bytes(data)
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise TooMuchStored
        try:
            self._scan.feed(data)
        except ApiError:
            raise TooMuchStored from None


def open_store(http: HttpConfig) -> ResponseStore | None:
    """Return the store of --response-store, if given; ConfigError if it cannot be used."""
    if http.response_store is None:
        return None
    return ResponseStore(http.response_store, http.response_store_bytes, max_read_bytes=http.max_body_bytes)


def _open(path: str) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path, timeout=BUSY_SECONDS)
    version = database.execute("PRAGMA user_version").fetchone()[0]
    tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if version != VERSION and (version or tables):
        raise sqlite3.DatabaseError("it is not a file of this server's responses")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the last responses only
    database.execute("PRAGMA secure_delete = ON")
    database.executescript(_SCHEMA)
    database.execute(f"PRAGMA user_version = {VERSION}")
    return database


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of the file at a path; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino

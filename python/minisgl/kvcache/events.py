"""KV events tell routers which pages a cache holds, so that they can send a request to the server with its prefix.

`EventRecorder` observes a cache and turns its changes into vLLM's events, whose blocks are our pages. A block's hash is
made of its parent's hash and its own tokens, so it stands for the whole prefix, and a prefix has the same hash in every
server and after every restart.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

import msgspec

from minisgl.core import Int32Array

_MEDIUM = "GPU"  # vLLM's name for the memory of the device that computes, whatever it is
_HASH_BYTES = 8


class _Event(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Event, which is a map on the wire, with the name of its class under `type`."""


class BlockStored(_Event, frozen=True):
    """Blocks, each the parent of the next, have been cached."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first block begins the prompt
    token_ids: list[int]  # block_size tokens of each block
    block_size: int
    lora_id: int | None = None
    medium: str = _MEDIUM
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None  # for each block: the salt, if a salted prompt begins with it


class BlockRemoved(_Event, frozen=True):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str = _MEDIUM


class AllBlocksCleared(_Event, frozen=True):
    """No block is cached any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events between two publications, in order."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int = 0


def root_hash(salt: bytes) -> bytes:
    """Return the parent's hash for the first block of a prompt."""
    return blake2b(salt, digest_size=_HASH_BYTES).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block, made of its parent's hash and the int32 bytes of its tokens."""
    return blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()


def hash_number(digest: bytes) -> int:
    """Return a hash as a number for events: 63 bits, so that signed and unsigned readers get the same."""
    return int.from_bytes(digest, "big") >> 1


class EventRecorder:
    """Collects events until they are taken. Implements kvcache.base.CacheObserver.

    A page number is in a cache at most once, so hashes are kept by page number, and the recorder needs no knowledge of
    the tree and its splits.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hashes: dict[int, bytes] = {}  # hash by cached page
        self._events: list[Event] = []

    def stored(self, parent: int | None, tokens: Int32Array, pages: Int32Array, salt: bytes) -> None:
        digest = root_hash(salt) if parent is None else self._hashes[parent]
        above = None if parent is None else hash_number(digest)
        hashes = []
        for page, run in zip(pages.tolist(), tokens.reshape(-1, self._page_size), strict=True):
            digest = self._hashes[page] = block_hash(digest, run.tobytes())
            hashes.append(hash_number(digest))
        keys = None
        if salt and parent is None:
            keys = [[salt.hex()], *[None] * (len(pages) - 1)]
        self._events.append(BlockStored(hashes, above, tokens.tolist(), self._page_size, extra_keys=keys))

    def removed(self, pages: Int32Array) -> None:
        self._events.append(BlockRemoved([hash_number(self._hashes.pop(page)) for page in pages.tolist()]))

    def cleared(self) -> None:
        self._hashes.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

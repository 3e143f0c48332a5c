"""A router's view of a cache: the set of cached prefixes, from nothing but KV events as they are on the wire."""

from __future__ import annotations

from typing import Any

Prefix = tuple[int, ...]


class KVSubscriber:
    def __init__(self) -> None:
        self._by_hash: dict[int, Prefix] = {}

    @property
    def prefixes(self) -> set[Prefix]:
        return set(self._by_hash.values())

    @property
    def num_blocks(self) -> int:
        """Number of cached blocks; with different salts, several may have the same prefix."""
        return len(self._by_hash)

    def apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                above = event["parent_block_hash"]
                prefix = () if above is None else self._by_hash[above]
                size, tokens = event["block_size"], event["token_ids"]
                assert len(tokens) == size * len(event["block_hashes"])
                for index, block in enumerate(event["block_hashes"]):
                    assert block not in self._by_hash, "stored twice"
                    prefix = self._by_hash[block] = (*prefix, *tokens[index * size : (index + 1) * size])
            case "BlockRemoved":
                for block in event["block_hashes"]:
                    del self._by_hash[block]
            case "AllBlocksCleared":
                self._by_hash.clear()
            case other:
                raise AssertionError(other)

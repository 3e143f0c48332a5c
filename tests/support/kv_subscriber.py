"""A router's view of a cache: the set of cached prefixes, from nothing but KV events as they are on the wire."""

from __future__ import annotations

from typing import Any

Prefix = tuple[int, ...]


class KVSubscriber:
    def __init__(self) -> None:
        self._by_hash: dict[int, tuple[str, Prefix]] = {}

    @property
    def salted_prefixes(self) -> set[tuple[str, Prefix]]:
        """Cached prefixes, each with its salt in hexadecimal; "" if it has none."""
        return set(self._by_hash.values())

    @property
    def prefixes(self) -> set[Prefix]:
        return {prefix for _, prefix in self._by_hash.values()}

    def apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                above = event["parent_block_hash"]
                salt, prefix = ("", ()) if above is None else self._by_hash[above]
                size, tokens = event["block_size"], event["token_ids"]
                assert len(tokens) == size * len(event["block_hashes"])
                if event["extra_keys"] is not None:
                    assert above is None, "only the first block of a prompt has its salt"
                    (salt,), *others = event["extra_keys"]
                    assert others == [None] * (len(event["block_hashes"]) - 1)
                for index, block in enumerate(event["block_hashes"]):
                    assert block not in self._by_hash, "stored twice"
                    assert 0 <= block < 1 << 63, "signed and unsigned readers get another number"
                    prefix = (*prefix, *tokens[index * size : (index + 1) * size])
                    self._by_hash[block] = salt, prefix
            case "BlockRemoved":
                assert event["block_hashes"], "nothing was removed"
                for block in event["block_hashes"]:
                    del self._by_hash[block]
            case "AllBlocksCleared":
                self._by_hash.clear()
            case other:
                raise AssertionError(other)

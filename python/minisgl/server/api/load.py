"""Load of the engine, made from the scheduler's counts: /metrics and what routers ask tell the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Sequences, and tokens of the KV cache, at one look."""

    running: int = 0  # sequences that are computed
    waiting: int = 0  # sequences that wait for their turn
    tokens_used: int = 0  # in pages that running sequences hold
    tokens_waiting: int = 0  # known tokens of those that wait
    max_tokens: int = 0  # that the KV cache holds
    prefix_tokens_queried: int = 0  # prompt tokens looked for in the cache, since the start
    prefix_tokens_hit: int = 0  # of these, found
    generation_rate: float = 0.0  # tokens/s between the last two heartbeats
    window_usage: float = 0.0  # share of the windowed layers' pages that running sequences hold

    @classmethod
    def of(cls, counts: Mapping[str, int], page_size: int, generation_rate: float) -> EngineLoad:
        """Return the load that the scheduler's counts say; without any (before the first heartbeat) there is none."""

        def held(kind: str) -> int:
            unlocked = counts.get(f"{kind}_cached", 0) - counts.get(f"{kind}_locked", 0)
            return counts.get(kind, 0) - counts.get(f"{kind}_free", 0) - unlocked

        return cls(
            counts.get("requests_running", 0),
            counts.get("requests_waiting", 0),
            held("pages") * page_size,
            counts.get("tokens_waiting", 0),
            counts.get("pages", 0) * page_size,
            counts.get("prefix_tokens_queried", 0),
            counts.get("prefix_tokens_hit", 0),
            generation_rate,
            held("window_pages") / max(counts.get("window_pages", 0), 1),
        )

    @property
    def usage(self) -> float:
        """Share of the KV cache that running sequences hold, of the fuller pool if there are two; 1 is all."""
        return max(self.tokens_used / self.max_tokens, self.window_usage) if self.max_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the cache, since the start."""
        return self.prefix_tokens_hit / self.prefix_tokens_queried if self.prefix_tokens_queried else 0.0

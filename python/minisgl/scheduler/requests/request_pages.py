"""Pages of running requests: promised at admission, allocated as the rows grow, shared by prefix, and given back.

Pages are promised for a request's known tokens only, so the running requests can outgrow the pool: the scheduler then
retracts one. Available pages are those that are free and those that can be evicted from the cache.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import CacheNode, IndexArray, Int32Array, pages_for
from minisgl.kvcache.base import CacheHandle
from minisgl.kvcache.page_trust import PageTrust
from minisgl.scheduler.cache_pools import CachePools
from minisgl.scheduler.requests.request import Awaited, Request
from minisgl.scheduler.requests.table import SlotTable, common_length
from minisgl.scheduler.requests.window_rows import WindowRows

WATERMARK = 0.02  # share of all pages that must stay free at an admission, besides one page for each running request


class RequestPages:
    """Owner of the page pools and the prefix cache. A request's locked prefix in the cache is `Request.prefix`.

    Layers that attend to a window may have pages of their own (`_windows`); all other layers are the full group.
    """

    def __init__(self, pools: CachePools, table: SlotTable, max_prefill_tokens: int) -> None:
        """`max_prefill_tokens`: of a step, whose tokens all need windowed pages."""
        self._pool = pools.pages
        self._cache = pools.pages.cache
        self._snapshots = pools.snapshots  # a prefix can be used only up to a snapshot
        self._table = table
        self._page_size = self._cache.page_size
        self._trust = PageTrust(pools.pages.num_pages)
        self._reserved = 0  # promised to running requests and not yet allocated
        self._windows = None
        if pools.windows is not None:
            self._windows = WindowRows(pools.windows, table, self._pool.num_pages, max_prefill_tokens)

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def unpromised(self) -> int:
        """Number of pages that are available and not promised, in the group that has fewer."""
        return self._unpromised_full if self._windows is None else min(self._unpromised_full, self._windows.unpromised)

    @property
    def _unpromised_full(self) -> int:
        """Number of pages of the full group that are available and not promised."""
        return self._pool.available - self._reserved

    def match(self, request: Request) -> CacheHandle:
        """Return the longest cached prefix that the request can use."""
        found = self._match_pages(request)
        if self._snapshots is not None:
            return self._first_pages(found, self._snapshots.find(found.pages), request)
        if self._windows is not None:
            return self._first_pages(found, self._windows.usable(found.pages), request)
        return found

    def cached_len(self, request: Request) -> int:
        """Return how many of the request's tokens have K and V in the cache, even if it cannot use all of them."""
        return self._match_pages(request).cached_len

    def _match_pages(self, request: Request) -> CacheHandle:
        # The last known token is always computed, because its logits choose the next one. All tokens are computed if
        # the prompt's log-probabilities are wanted.
        known = len(request.token_ids) - 1 if request.prompt_scored else 0
        found = self._cache.match(request.token_ids[:known], request.salt)
        return self._first_pages(found, self._trust.usable(found.pages), request)

    def _first_pages(self, prefix: CacheHandle, num_pages: int, request: Request) -> CacheHandle:
        """Return the first `num_pages` pages of a prefix that was found for this request."""
        if num_pages == len(prefix.pages):
            return prefix
        return self._cache.match(request.token_ids[: num_pages * self._page_size], request.salt)

    def coming(self, request: Request, cached_len: int, running: IndexArray) -> Awaited | None:
        """Return a longer prefix of a request that a running prefill will put into the cache; None if there is none."""
        if not self._cache.keeps_prefixes:
            return None
        table, tokens = self._table, request.token_ids
        for slot in table.prefilling(running):
            known = table.tokens[slot, : min(int(table.entry_len[slot]), len(tokens) - 1)]
            # Most prompts differ in the first page that is not cached, and many share a long cached prefix.
            computed, end = int(table.cached_len[slot]), cached_len + self._page_size
            if end > len(known) or not request.may_wait_for(other := table.request(slot)):
                continue
            if np.array_equal(known[cached_len:end], tokens[cached_len:end]):
                length = common_length(known, tokens) // self._page_size * self._page_size
                if length > max(cached_len, computed):
                    return Awaited(other.seq_id, length)
        return None

    def reserve(self, request: Request, prefix: CacheHandle, num_running: int) -> bool:
        """Lock the prefix and promise pages for the other known tokens; False if too few pages would stay free.

        Some must stay free if other requests run, so that all of them can grow for a while (WATERMARK).
        """
        self._cache.lock(prefix)
        needed = pages_for(len(request.token_ids), self._page_size) - len(prefix.pages)
        headroom = _headroom(num_running, self.num_pages)
        if needed + headroom > self._unpromised_full or not self._reserve_window(request, prefix, num_running):
            self._cache.unlock(prefix)
            return False
        request.prefix = prefix
        request.reserved_pages = needed
        self._reserved += needed
        return True

    def _reserve_window(self, request: Request, prefix: CacheHandle, num_running: int) -> bool:
        """Lock the prefix's windowed pages; False if too few would stay free. True if there is no windowed group."""
        windows = self._windows
        if windows is None:
            return True
        windows.lock(prefix.pages)
        needed = windows.needed(len(request.token_ids), prefix.pages)
        if needed + _headroom(num_running, windows.pool.num_pages) > windows.unpromised:
            windows.unlock(prefix.pages)
            return False
        return True

    def enter(self, request: Request, prefix: CacheHandle) -> Int32Array | None:
        """Give a slot to a request that has reserved pages; return the windowed pages of its prefix, if any."""
        slot = self._table.enter(request, prefix.pages)
        if self._windows is None:
            return None
        return self._windows.enter(slot, len(request.token_ids), prefix.pages)

    def missing(self, slots: IndexArray, new_len: Int32Array) -> Int32Array:
        """Return the number of pages that each row lacks for `new_len` tokens."""
        missing: Int32Array = -(-new_len // self._page_size) - self._table.num_pages[slots]
        return missing

    def allocate(self, slots: IndexArray, counts: Int32Array) -> Int32Array:
        """Append counts[i] new pages to the row of slots[i]; return `Batch.new_pages`."""
        if not counts.any():
            return np.empty((0, 3), dtype=np.int32)
        crossing = counts > 0
        slots, counts = slots[crossing], counts[crossing].astype(np.int32)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            request = self._table.request(slot)
            promised = min(count, request.reserved_pages)
            request.reserved_pages -= promised
            self._reserved -= promised
        pages = self._pool.allocate(int(counts.sum()))
        self._trust.allocated(pages)
        entries = self._table.extend_pages(slots, counts, pages)
        return entries if self._windows is None else self._windows.extend(entries)

    def planned(self, slots: IndexArray, new_len: Int32Array) -> None:
        """Share the chunks of a planned step; give back the windowed pages behind the rows' windows.

        So a request with the same beginning waits for that alone and not for a whole long prompt, and windowed pages
        can stay in the cache when they are behind the window. Prompts whose prefixes can be used only up to a snapshot
        are shared at their ends, and where snapshots are saved.
        """
        entry_len = self._table.entry_len[slots]
        shared = new_len == entry_len if self._snapshots is not None else new_len <= entry_len
        for slot, length in zip(slots[shared].tolist(), new_len[shared].tolist(), strict=True):
            self.share_prefix(self._table.request(slot), length)
        if self._windows is not None:
            self._windows.give_back_behind(slots, new_len >= entry_len)

    def share_prefix(self, request: Request, length: int) -> int | None:
        """Put the request's first `length` tokens, whose last chunk is planned, into the cache; lock the new prefix.

        The pages may be shared before they are written, because any reader runs in a later step. Return the cached page
        of the last whole page of tokens; None if there is none.

        If another request has put the same tokens there first, this one still keeps its own pages until it ends,
        because its row must not change while a step reads it; the other's pages are locked in addition. Nothing is put
        into the cache if that lock would take pages promised to other requests, or so many that this request could not
        finish alone. Cached pages without a windowed page get this request's; nothing is put into the cache if
        windowed pages that this would replace are locked, or after a suspect page.
        """
        assert request.prefix is not None
        whole = length // self._page_size
        tokens, pages = self._table.tokens[request.slot, : whole * self._page_size], self._table.row_pages(request.slot)
        found = self._cache.match(tokens, request.salt)
        if self._trust.usable(found.pages) < len(found.pages):
            return None
        foreign = len(found.pages) - len(request.prefix.pages)
        if foreign > 0:
            twice = np.count_nonzero(found.pages != pages[: len(found.pages)])
            if (
                foreign > self._unpromised_full
                or pages_for(request.max_len, self._page_size) + twice > self.num_pages
                or (self._windows is not None and not self._windows.can_share(request.slot, found.pages))
            ):
                return int(found.pages[-1]) if len(found.pages) == whole else None
        shared = self._cache.insert(tokens, pages[:whole], request.salt).handle
        self._cache.lock(shared)
        self._cache.unlock(request.prefix)
        request.prefix = shared
        if self._windows is not None:
            self._windows.share(request.slot, shared.pages)
            self._added_to(shared.pages, pages)
        return int(shared.pages[-1]) if len(shared.pages) else None

    def record_outcome(self, request: Request, *, is_finite: bool) -> None:
        """Record at a running request's end what its logits tell about its pages; `is_finite`: none of them was NaN.

        Pages of a failed request are suspect unless they are proven, now also by the tokens of those that still run. So
        are the cached pages with its tokens that it has not read, because it may have given them windowed pages and
        snapshots.
        """
        assert request.prefix is not None
        if is_finite:
            self._prove(request.slot)
            return
        for slot in np.flatnonzero(self._table.live).tolist():
            if slot != request.slot:
                self._prove(slot)
        row, cached = self._table.row_pages(request.slot), request.prefix.pages
        self._trust.suspect_unproven(row)
        self._trust.suspect(cached[cached != row[: len(cached)]])

    def _prove(self, slot: int) -> None:
        """Prove the pages from which a request's newest token was computed; its own K and V chose none yet."""
        known, row = int(self._table.known_len[slot]), self._table.row_pages(slot)
        if known > self._table.entry_len[slot]:
            prefix = row[: self._table.request(slot).hit_tokens // self._page_size]
            began = prefix[-1:] if self._windows is None else self._windows.seen_after(prefix)
            self._trust.prove(row[: (known - 1) // self._page_size], began)

    def snapshot_saved(self, request: Request, position: int, page: int) -> None:
        """Record that the request's state after `position` tokens is saved for this cached page of its tokens."""
        index = position // self._page_size - 1
        self._added_to(np.array([page], dtype=np.int32), self._table.pages[request.slot, index : index + 1])

    def _added_to(self, cached: Int32Array, row: Int32Array) -> None:
        """Record what a request has added to cached pages of its tokens; `row`: its own pages of these tokens."""
        self._trust.added_to(cached[cached != row[: len(cached)]])

    def give_back(self, request: Request) -> None:
        """Return a request's slot, pages and lock. No incomplete step may name the slot.

        Whole pages of known tokens go into the cache, where the next request with that beginning finds them. Say pages
        have 4 tokens, and an abort came when the host knew 11 tokens, while a step that was launched wrote K and V of a
        twelfth: known_len is 11, cached_len 12, and the row has the pages 5, 2 and 7. Page 7 is full on the device, but
        its last token never reached the host, so 2 pages are whole. Another request has put the same first 4 tokens
        into the cache meanwhile, in page 9: the cache takes page 2 and returns 5 as a duplicate. 5 and 7 become free.

        Nothing goes into the cache from the first suspect page on, and the last request that uses suspect pages in the
        cache removes them.
        """
        table, slot, prefix = self._table, request.slot, request.prefix
        assert prefix is not None
        pages = table.row_pages(slot)
        whole = min(int(table.cached_len[slot]), int(table.known_len[slot])) // self._page_size
        whole = self._trust.usable(pages[:whole])
        # Pages that the cache neither gets nor has already, under this request's lock.
        is_own = np.arange(len(pages)) >= whole
        is_own[: len(prefix.pages)] &= pages[: len(prefix.pages)] != prefix.pages
        result = self._cache.insert(table.tokens[slot, : whole * self._page_size], pages[:whole], request.salt)
        if self._windows is not None:
            self._windows.leave(slot, result.handle.pages)
            self._added_to(result.handle.pages, pages)
        self._cache.unlock(prefix)
        request.prefix = None
        self._forget_suspects(table.tokens[slot, : prefix.cached_len], prefix, request.salt)
        self._pool.free(result.duplicates)
        self._pool.free(pages[is_own])
        self._reserved -= request.reserved_pages
        request.reserved_pages = 0
        table.leave(slot)

    def _forget_suspects(self, tokens: Int32Array, prefix: CacheHandle, salt: bytes) -> None:
        """Remove suspect pages of a cached prefix and all after them from the cache, unless they are locked."""
        usable = self._trust.usable(prefix.pages)
        if usable < len(prefix.pages):
            length = max(usable * self._page_size, self._cache.locked_len(prefix))
            self._pool.free(self._cache.forget(tokens, length, salt))

    def unwritten(self, request: Request, written: int) -> int | None:
        """Return the first token whose page the request put into the cache but never wrote, if `written` tokens are.

        None if all its own cached pages are written. Pages that others put there are not counted.
        """
        assert request.prefix is not None
        first = written // self._page_size
        cached, row = request.prefix.pages, self._table.row_pages(request.slot)
        own = np.flatnonzero(cached[first:] == row[first : len(cached)])
        return (first + int(own[0])) * self._page_size if len(own) else None

    def forget_windows(self, cached: Int32Array) -> None:
        """Free the windowed pages of these cached pages, which were never written; their readers are retracted."""
        if self._windows is not None:
            self._windows.pool.drop_unlocked(cached)

    def forget(self, request: Request, length: int) -> None:
        """Remove the request's tokens beyond the first `length` from the cache: their K and V were never written."""
        self._pool.free(self._cache.forget(request.token_ids, length, request.salt))

    def tree(self, max_nodes: int) -> list[CacheNode]:
        """Return the largest nodes of the tree of cached prefixes."""
        return self._cache.tree(max_nodes)

    def flush_cache(self) -> int:
        """Remove every cached prefix that is not locked; return the number of freed pages."""
        return self._pool.flush_cache()

    def counts(self) -> dict[str, int]:
        """Return the number of pages by state, for /server_info."""
        counts = {
            "pages": self._pool.num_pages,
            "pages_free": self._pool.allocator.num_free,
            "pages_cached": self._cache.cached_pages,
            "pages_locked": self._cache.locked_pages,
            "pages_reserved": self._reserved,
            "pages_evicted": self._pool.evicted,
        }
        return counts if self._windows is None else counts | self._windows.counts()

    def check_idle(self) -> None:
        """Raise BrokenInvariant or RuntimeError if a page is lost, locked or promised although no request runs."""
        self._pool.check_idle()
        if self._snapshots is not None:
            self._snapshots.check()
        if self._windows is not None:
            self._windows.pool.check_idle(self._cache.owned_pages())
        if self._reserved:
            raise RuntimeError(f"held at idle: {self.counts()}")


def _headroom(num_running: int, num_pages: int) -> int:
    """Return the number of pages that must stay free at an admission while `num_running` requests run."""
    return num_running + int(WATERMARK * num_pages) if num_running else 0

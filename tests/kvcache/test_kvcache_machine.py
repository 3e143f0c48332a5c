"""Requests arrive, share prefixes, decode, end and are aborted, in any order and with far too few pages.

The oracle is a plain list of cached prefixes in the order of their last use. A page's content stands for keys and
values, which depend on all tokens before: the prefix up to the page's end. Every step compares the cache with the
oracle, and the pages with the requests that believe to own them. Snapshots are saved behind cached pages, more of them
than there are entries; their oracle is a list of prefixes, too, and an entry's content the prefix it was saved for.

The cache sees the tokens 0 and 1, with or without a salt. Here the tokens 2 and 3 are these with the salt, so that the
oracle needs to know nothing of salts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.core import Int32Array, pages_for
from minisgl.kvcache import make_cache
from minisgl.kvcache.base import BrokenInvariant, CacheHandle
from minisgl.kvcache.events import EventRecorder
from minisgl.kvcache.pages import OutOfPages, PagePool
from minisgl.kvcache.snapshots import SnapshotStore
from support.kv_subscriber import KVSubscriber

Prefix = tuple[int, ...]

SALTS = (b"", b"s" * 16)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=12)
WHICH = st.integers(0, 99)  # one of the requests, modulo their number


def array(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def salted(tokens: list[int]) -> tuple[Int32Array, bytes]:
    """Return the tokens as the cache sees them, and their salt."""
    return array([token % 2 for token in tokens]), SALTS[tokens[0] // 2 if tokens else 0]


def with_salt_of(prompt: list[int], more: list[int]) -> list[int]:
    return [token + prompt[0] // 2 * 2 for token in more]


class Oracle:
    """Each cached prefix of whole pages on its own; the least recently used is first in `pages`."""

    def __init__(self, page_size: int, keeps: bool) -> None:
        self.page_size = page_size
        self.snapshots: list[Prefix] = []  # prefixes with a page in the tree, least recently used first
        self.keeps = keeps
        self.pages: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def cached(self, tokens: list[int]) -> list[int]:
        return [self.pages[prefix] for prefix in self.prefixes(tokens) if prefix in self.pages]

    def use(self, tokens: list[int]) -> None:
        for prefix in reversed(self.prefixes(tokens)):
            if prefix in self.pages and prefix not in self.locks:
                self.pages[prefix] = self.pages.pop(prefix)

    def insert(self, tokens: list[int], pages: list[int]) -> list[int]:
        """The duplicates."""
        if not self.keeps:
            return pages
        for prefix, page in zip(self.prefixes(tokens), pages, strict=True):
            self.pages.setdefault(prefix, page)
        self.use(tokens)
        return [page for page in pages if page not in self.pages.values()]

    def lock(self, tokens: list[int]) -> None:
        for prefix in self.prefixes(tokens):
            self.locks[prefix] = self.locks.get(prefix, 0) + 1

    def unlock(self, tokens: list[int]) -> None:
        for prefix in self.prefixes(tokens):
            self.locks[prefix] -= 1
            if self.locks[prefix] == 0:
                del self.locks[prefix]
        self.use(tokens)

    def evictable(self) -> list[Prefix]:
        return [prefix for prefix in self.pages if prefix not in self.locks]

    def forget(self, tokens: list[int], length: int) -> set[int] | None:
        """All prefixes that begin with the first one beyond `length`; None if it is locked."""
        end = (length // self.page_size + 1) * self.page_size
        first = tuple(tokens[:end])
        if len(first) < end or first not in self.pages:
            return set()
        if first in self.locks:
            return None
        return self._remove([prefix for prefix in self.pages if prefix[: len(first)] == first])

    def evict(self, num_pages: int) -> set[int]:
        return self._remove(self.evictable()[:num_pages])

    def _remove(self, prefixes: list[Prefix]) -> set[int]:
        """Remove prefixes with their snapshots; return their pages."""
        self.snapshots = [prefix for prefix in self.snapshots if prefix not in prefixes]
        return {self.pages.pop(prefix) for prefix in prefixes}


@dataclass
class Running:
    tokens: list[int]
    handle: CacheHandle
    row: list[int]  # the page of each page_size tokens
    private: set[int] = field(default_factory=set)  # pages that only this request owns
    prefilled: bool = False

    @property
    def locked_tokens(self) -> list[int]:
        return self.tokens[: self.handle.cached_len]


class Requests(RuleBasedStateMachine):
    kind = "radix"

    @initialize(page_size=st.integers(1, 4), num_pages=st.integers(3, 14))
    def start_server(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.recorder = EventRecorder(page_size)
        self.subscriber = KVSubscriber()
        self.store = SnapshotStore(3, num_pages)
        self.cache = make_cache(self.kind, page_size, self.recorder, self.store)
        self.pool = PagePool(num_pages, self.cache)
        self.oracle = Oracle(page_size, keeps=self.kind == "radix")
        self.content: dict[int, Prefix] = {}
        self.saved: dict[int, Prefix] = {}  # content of the store's entries
        self.prompts: list[list[int]] = []
        self.requests: list[Running] = []

    # ---- what a request does ----

    @rule(prompt=PROMPT, has_salt=st.booleans())
    def enter(self, prompt: list[int], has_salt: bool) -> None:
        self.begin([token + 2 * has_salt for token in prompt])

    @precondition(lambda self: self.prompts)
    @rule(which=WHICH, keep=st.integers(0, 12), more=st.lists(st.integers(0, 1), max_size=4))
    def enter_like_another(self, which: int, keep: int, more: list[int]) -> None:
        other = self.prompts[which % len(self.prompts)]
        prompt = other[:keep] + with_salt_of(other, more)
        self.begin(prompt or [0])

    @precondition(lambda self: self.requests)
    @rule(which=WHICH)
    def finish_prefill(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        if request.prefilled:
            return
        old, new = request.handle, self.insert(request, len(request.tokens))
        self.cache.lock(new)
        self.oracle.lock(request.tokens[: new.cached_len])
        self.cache.unlock(old)
        self.oracle.unlock(request.locked_tokens)
        request.handle = new
        request.prefilled = True

    @precondition(lambda self: any(request.prefilled for request in self.requests))
    @rule(which=WHICH, token=st.integers(0, 1), times=st.integers(1, 4))
    def decode(self, which: int, token: int, times: int) -> None:
        running = [request for request in self.requests if request.prefilled]
        request = running[which % len(running)]
        for _ in range(times):
            if not self.extend(request, len(request.tokens) + 1):
                self.end(request, len(request.tokens))  # retracted
                return
            request.tokens += with_salt_of(request.tokens, [token])
            self.write(request)

    @precondition(lambda self: self.requests)
    @rule(which=WHICH, computed=st.integers(0, 12))
    def finish_or_abort(self, which: int, computed: int) -> None:
        """A request may end at any moment; in its prefill, some of its tokens are computed."""
        request = self.requests[which % len(self.requests)]
        at_least = len(request.tokens) if request.prefilled else request.handle.cached_len
        self.end(request, max(at_least, min(computed, len(request.tokens))))

    @precondition(lambda self: self.prompts)
    @rule(which=WHICH, keep=st.integers(1, 12))
    def look_up(self, which: int, keep: int) -> None:
        """A match that is not locked, as a policy does to choose; it may split nodes."""
        tokens = self.prompts[which % len(self.prompts)][:keep]
        handle = self.match(tokens)
        locked = [prefix for prefix in self.oracle.prefixes(tokens) if prefix in self.oracle.locks]
        assert self.cache.locked_len(handle) == len(max(locked, key=len, default=()))

    @precondition(lambda self: any(request.handle.cached_len for request in self.requests))
    @rule(which=WHICH, keep=WHICH)
    def save_snapshot(self, which: int, keep: int) -> None:
        """Save the state at some page's end of a prefix that the cache has."""
        requests = [request for request in self.requests if request.handle.cached_len]
        pages = requests[which % len(requests)].handle.pages.tolist()
        page = pages[keep % len(pages)]
        prefix, snapshots = self.content[page], self.oracle.snapshots
        if page in self.store:
            assert prefix in snapshots
            with pytest.raises(BrokenInvariant, match="has a snapshot already"):
                self.store.add(page)
            return
        saved, evicted = self.store.saved, self.store.evicted
        if len(snapshots) == self.store.num_entries:
            evicted += 1
            snapshots.pop(0)
        snapshots.append(prefix)
        self.saved[self.store.add(page)] = prefix
        assert (self.store.saved, self.store.evicted) == (saved + 1, evicted)

    @precondition(lambda self: self.prompts)
    @rule(which=WHICH, more=st.lists(st.integers(0, 1), max_size=4))
    def restore_snapshot(self, which: int, more: list[int]) -> None:
        """The longest live snapshot of a prefix is found, and no other's state."""
        prompt = self.prompts[which % len(self.prompts)]
        tokens = prompt + with_salt_of(prompt, more)
        pages = self.match(tokens).pages
        live = [prefix for prefix in self.oracle.prefixes(tokens) if prefix in self.oracle.snapshots]
        found = self.store.find(pages)
        assert found == (len(live[-1]) // self.page_size if live else 0)
        if found:
            assert self.saved[self.store.use(int(pages[found - 1]))] == live[-1]
            self.oracle.snapshots.remove(live[-1])
            self.oracle.snapshots.append(live[-1])

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        expected = self.oracle.evict(num_pages)
        evicted = self.cache.evict(num_pages)
        assert set(evicted.tolist()) == expected
        self.pool.free(evicted)

    @precondition(lambda self: self.prompts)
    @rule(which=WHICH, keep=st.integers(0, 12))
    def forget(self, which: int, keep: int) -> None:
        tokens = self.prompts[which % len(self.prompts)]
        length = min(keep, len(tokens))
        self.oracle.use(tokens[:length])
        expected = self.oracle.forget(tokens, length)
        plain, salt = salted(tokens)
        if expected is None:
            with pytest.raises(ValueError, match="is locked"):
                self.cache.forget(plain, length, salt)
            return
        forgotten = self.cache.forget(plain, length, salt)
        assert set(forgotten.tolist()) == expected
        self.pool.free(forgotten)

    @rule()
    def flush(self) -> None:
        assert self.pool.flush_cache() == len(self.oracle.evict(10**6))

    # ---- steps that the rules share ----

    def begin(self, prompt: list[int]) -> None:
        self.prompts = [prompt, *self.prompts[:5]]
        handle = self.match(prompt[:-1])
        self.cache.lock(handle)
        request = Running(prompt.copy(), handle, handle.pages.tolist())
        self.oracle.lock(request.locked_tokens)
        if self.extend(request, len(prompt)):
            self.requests.append(request)
            self.write(request)
        else:
            self.cache.unlock(handle)
            self.oracle.unlock(request.locked_tokens)

    def match(self, tokens: list[int]) -> CacheHandle:
        handle = self.cache.match(*salted(tokens))
        assert handle.pages.tolist() == self.oracle.cached(tokens)
        assert handle.cached_len == len(handle.pages) * self.page_size
        assert [self.content[page] for page in handle.pages] == self.oracle.prefixes(tokens[: handle.cached_len])
        self.oracle.use(tokens)
        return handle

    def extend(self, request: Running, num_tokens: int) -> bool:
        """Give a request the pages for this many tokens, if there are enough."""
        wanted = pages_for(num_tokens, self.page_size) - len(request.row)
        free = self.pool.allocator.num_free
        available = free + len(self.oracle.evictable())
        assert self.pool.available == available
        if wanted > available:
            with pytest.raises(OutOfPages, match=f"{wanted} pages are requested, {available} are"):
                self.pool.allocate(wanted)
            return False
        self.oracle.evict(max(0, wanted - free))
        pages = self.pool.allocate(wanted).tolist()
        assert len(pages) == wanted
        request.row += pages
        request.private |= set(pages)
        return True

    def write(self, request: Running) -> None:
        """Store the KV of a prefill or decode step; only to pages that the request owns."""
        for i, page in enumerate(request.row):
            if page in request.private:
                self.content[page] = tuple(request.tokens[: (i + 1) * self.page_size])

    def insert(self, request: Running, num_tokens: int) -> CacheHandle:
        tokens = request.tokens[:num_tokens]
        pages = request.row[: num_tokens // self.page_size]
        expected = self.oracle.insert(tokens, pages)
        plain, salt = salted(tokens)
        handle, duplicates = self.cache.insert(plain, array(pages), salt)
        assert duplicates.tolist() == expected
        assert set(expected) <= request.private
        assert handle.pages.tolist() == self.oracle.cached(tokens)
        assert handle.cached_len == len(handle.pages) * self.page_size
        request.private -= set(pages) - set(expected)
        return handle

    def end(self, request: Running, computed: int) -> None:
        self.insert(request, computed)
        self.cache.unlock(request.handle)
        self.oracle.unlock(request.locked_tokens)
        self.pool.free(array(sorted(request.private)))  # the duplicates, and what the tokens did not fill
        self.requests = [other for other in self.requests if other is not request]

    # ---- what always holds ----

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.cache.check()
        self.pool.allocator.check()
        owned = self.pool.allocator.free_pages().tolist() + self.cache.owned_pages().tolist()
        for request in self.requests:
            owned += request.private
        assert sorted(owned) == list(range(self.pool.num_pages))

    @invariant()
    def the_cache_agrees_with_the_oracle(self) -> None:
        assert sorted(self.cache.owned_pages().tolist()) == sorted(self.oracle.pages.values())
        assert self.cache.cached_pages == len(self.oracle.pages)
        assert self.cache.locked_pages == len(self.oracle.locks)
        assert self.cache.evictable_pages == len(self.oracle.evictable())

    @invariant()
    def snapshots_go_with_their_pages_and_entries_have_one_owner(self) -> None:
        self.store.check()
        assert [self.content[page] for page in self.store.pages()] == self.oracle.snapshots

    @invariant()
    def a_subscriber_to_its_events_knows_all_cached_prefixes(self) -> None:
        for event in self.recorder.take():
            self.subscriber.apply(msgspec.to_builtins(event))
        cached = [salted(list(prefix)) for prefix in self.oracle.pages]
        assert self.subscriber.salted_prefixes == {(salt.hex(), tuple(tokens.tolist())) for tokens, salt in cached}

    @invariant()
    def every_request_still_reads_what_it_wrote(self) -> None:
        for request in self.requests:
            ends = [min((i + 1) * self.page_size, len(request.tokens)) for i in range(len(request.row))]
            assert [self.content[page] for page in request.row] == [tuple(request.tokens[:end]) for end in ends]

    def teardown(self) -> None:
        while getattr(self, "requests", []):
            self.end(self.requests[0], self.requests[0].handle.cached_len)
        if hasattr(self, "pool"):
            self.pool.check_idle()


class RequestsWithoutCache(Requests):
    kind = "naive"


PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=150, stateful_step_count=50)

TestRadix = Requests.TestCase
TestRadix.settings = PROFILE
TestNaive = RequestsWithoutCache.TestCase
TestNaive.settings = settings(PROFILE, max_examples=25)

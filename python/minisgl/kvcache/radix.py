"""The radix cache: computed prefixes in a tree, shared by all requests that begin with the same tokens.

An edge of the tree is a run of whole pages; where two prompts diverge, a run is split at a page boundary. So a node
stands for one prefix, and its children differ in their first page. The idea is SGLang's RadixAttention
(https://arxiv.org/abs/2312.07104). Eviction never searches the tree:

- A lock counts on every node of its path, so no node below an unlocked one is locked.
- The unlocked nodes are in one queue, least recently used first. A use moves the nodes of its path to the end, the
  deepest first, so a node always follows its children. The first node is therefore a leaf, and is evicted next.
- Matching, inserting and unlocking are uses. There is no clock: the same calls always evict the same pages.

Tokens are stored as the bytes of their int32 array, which compare and hash fast. A salt is put before the first page's
tokens in the key of a child of the root, so different salts have different subtrees.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from minisgl.core import CacheNode, Int32Array
from minisgl.kvcache.base import (
    BrokenInvariant,
    CacheHandle,
    CacheObserver,
    InsertResult,
    empty_pages,
    require,
    require_locked,
    require_one_page_each,
    require_page_size,
)

_TOKEN_BYTES = 4
_GONE = -1  # the `end` of a node that was evicted or joined into another
_LOOKED_AT = 256  # newest children of a node among which `tree` finds the largest


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """Prefix that the path from the root to this node has; the node holds the last run of its pages.

    `end` changes only when the tail is evicted, because in a split the old node becomes the lower part, and nodes are
    joined into the lowest. So a locked handle stays valid, and a handle with another length is stale.
    """

    parent: _Node | None  # None: the root, or gone
    key: bytes  # key in the parent's `children`: tokens of its first page; below the root, the salt before them
    tokens: bytes  # tokens of the run, as bytes
    pages: Int32Array  # pages of the run
    end: int  # tokens of the whole prefix
    locks: int = 0  # locks of all handles that end here or below
    children: dict[bytes, _Node] = field(default_factory=dict)  # by their keys


class RadixCache:
    """Cache of prefixes as a tree. Implements kvcache.base.CacheManager. An example with pages of 4 tokens:

        first = cache.insert(A, [0, 1])     # A: tokens 1 2 3 4 5 6 7 8; one node with pages 0 and 1
        second = cache.insert(B, [0, 3])    # B: tokens 1 2 3 4 5 6 70 80; a split after page 0, and a leaf with page 3

    A and B share 6 tokens, but only one whole page: B's request got page 0 from `match`, and computed tokens 5 and 6
    again, into page 3. `second.duplicates` is empty. If B had come with a page 2 of its own for tokens 1 to 4, the tree
    would have kept page 0, and page 2 would be a duplicate. With no locks, `evict(3)` returns pages 1, 3 and 0: A's
    leaf, which was used before B's, then B's leaf, then the node above, which has no child left.
    """

    keeps_prefixes = True

    def __init__(self, page_size: int, *observers: CacheObserver) -> None:
        require_page_size(page_size)
        self._observers = observers
        self.page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._root = _Node(None, b"", b"", empty_pages(), end=0)
        self._queue: OrderedDict[_Node, None] = OrderedDict()  # unlocked nodes, in the order of eviction
        self._cached = 0
        self._locked = 0

    @property
    def cached_pages(self) -> int:
        return self._cached

    @property
    def locked_pages(self) -> int:
        return self._locked

    @property
    def evictable_pages(self) -> int:
        return self._cached - self._locked

    # ---- finding and adding ----

    def match(self, tokens: Int32Array, salt: bytes = b"") -> CacheHandle:
        node, pages = self._walk(self._whole_pages(tokens), salt)
        self._use(node)
        return CacheHandle(node.end, pages, node)

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: bytes = b"") -> InsertResult:
        # In the example: the walk for B finds page 0 and splits after it; page 3 becomes a leaf below the new node.
        require_one_page_each(tokens, pages, self.page_size)
        whole = self._whole_pages(tokens)
        node, found = self._walk(whole, salt)
        given, new = pages[: len(found)], np.array(pages[len(found) :], dtype=np.int32)  # a copy to keep
        if len(new) > 0:
            leaf = self._add_leaf(node, whole[node.end * _TOKEN_BYTES :], new, salt)
            for observer in self._observers:
                parent = int(node.pages[-1]) if len(node.pages) > 0 else None
                observer.stored(parent, np.frombuffer(leaf.tokens, np.int32), new, salt)
            node = leaf
        self._use(node)
        handle = CacheHandle(node.end, np.concatenate([found, new]), node)
        return InsertResult(handle, duplicates=given[given != found])

    def _walk(self, tokens: bytes, salt: bytes) -> tuple[_Node, Int32Array]:
        """Return the node at which the longest cached prefix ends, splitting one if necessary, and its path's pages."""
        node, at, runs = self._root, 0, [empty_pages()]
        key = self._child_key(node, tokens, salt)
        while child := node.children.get(key):
            if not tokens.startswith(child.tokens, at):
                child = self._split(child, self._common_pages(child.tokens, tokens[at:]))
            runs.append(child.pages)
            at += len(child.tokens)
            node, key = child, tokens[at : at + self._page_bytes]
        return node, np.concatenate(runs)

    def _add_leaf(self, parent: _Node, tokens: bytes, pages: Int32Array, salt: bytes) -> _Node:
        key = self._child_key(parent, tokens, salt)
        leaf = _Node(parent, key, tokens, pages, end=parent.end + len(pages) * self.page_size)
        parent.children[key] = leaf
        self._cached += len(pages)
        return leaf

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Move the first pages of a run to a new node above it, which gets the same locks; return the new node.

        A's node of pages 0 and 1, split after 1 page, becomes a new node with page 0 (end 4) and below it the old node
        with page 1, whose end is still 8. So a handle of A stays valid.
        """
        assert node.parent is not None
        first, rest = node.pages[:num_pages].copy(), node.pages[num_pages:].copy()  # a view would keep the whole run
        cut = num_pages * self._page_bytes
        upper = _Node(
            node.parent, node.key, node.tokens[:cut], first, end=node.end - len(rest) * self.page_size, locks=node.locks
        )
        node.parent.children[upper.key] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], rest
        node.key = self._first_page(node.tokens)
        upper.children[node.key] = node
        return upper

    def _use(self, node: _Node) -> None:
        """Move the unlocked nodes of a path to the end of the queue, deepest first; new nodes enter the queue."""
        while node.parent is not None:
            if node.locks == 0:
                self._queue[node] = None
                self._queue.move_to_end(node)
            node = node.parent

    def _whole_pages(self, tokens: Int32Array) -> bytes:
        whole = len(tokens) // self.page_size * self.page_size
        return np.asarray(tokens[:whole], dtype=np.int32).tobytes()

    def _child_key(self, node: _Node, tokens: bytes, salt: bytes) -> bytes:
        """Return the key of a node's child whose run begins with these tokens."""
        return (salt if node is self._root else b"") + self._first_page(tokens)

    def _first_page(self, tokens: bytes) -> bytes:
        return tokens[: self._page_bytes]

    def _common_pages(self, ours: bytes, theirs: bytes) -> int:
        length = min(len(ours), len(theirs))
        equal = np.frombuffer(ours[:length], np.int8) == np.frombuffer(theirs[:length], np.int8)
        common = length if equal.all() else int(equal.argmin())  # the first False
        return common // self._page_bytes

    # ---- locking ----

    def lock(self, handle: CacheHandle) -> None:
        node: _Node = handle.node
        if node.end != handle.cached_len:
            raise ValueError(f"this handle of {handle.cached_len} tokens is stale: it was not locked in time")
        handle.locks += 1
        while node.parent is not None:
            if node.locks == 0:
                self._locked += len(node.pages)
                del self._queue[node]
            node.locks += 1
            node = node.parent

    def unlock(self, handle: CacheHandle) -> None:
        require_locked(handle)  # the nodes' locks may be those of other handles
        handle.locks -= 1
        node: _Node = handle.node
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._locked -= len(node.pages)
                self._queue[node] = None
            node = node.parent
        self._join(handle.node)

    def _join(self, node: _Node) -> None:
        """Join each only child on a path just used with the nodes above it, if no locked prefix ends there.

        Splits stay when the branches for which they were made are evicted. Without this, a long prefix from which many
        prompts have parted would be a chain of up to one node a page, and each match would walk it. The nodes are
        neighbours in the queue, if they are in it, so the order of eviction stays as it is.
        """
        while node.parent is not None:
            run, above = [node], node.parent
            while above.parent is not None and len(above.children) == 1 and above.locks == node.locks:
                run.append(above)
                above = above.parent
            if len(run) > 1:
                node.key, node.parent = run[-1].key, above
                above.children[node.key] = node
                node.tokens = b"".join(part.tokens for part in reversed(run))
                node.pages = np.concatenate([part.pages for part in reversed(run)])
                for part in run[1:]:
                    part.parent, part.end = None, _GONE
                    self._queue.pop(part, None)
            node = above

    def locked_len(self, handle: CacheHandle) -> int:
        node: _Node = handle.node
        while node.parent is not None and node.locks == 0:
            node = node.parent
        return node.end

    # ---- evicting ----

    def evict(self, num_pages: int) -> Int32Array:
        return self._report_removed(self._evict(num_pages))

    def _evict(self, num_pages: int) -> Int32Array:
        missing = min(num_pages, self.evictable_pages)
        evicted = [empty_pages()]
        while missing > 0:
            leaf = next(iter(self._queue))
            tail = leaf.pages[-missing:]
            self._drop_tail(leaf, len(tail))
            evicted.append(tail)
            missing -= len(tail)
        return np.concatenate(evicted)

    def forget(self, tokens: Int32Array, length: int, salt: bytes = b"") -> Int32Array:
        keep, _ = self._walk(self._whole_pages(tokens[:length]), salt)
        self._use(keep)
        # If the walk ends before `length`, no child has the next page.
        rest = self._whole_pages(tokens)[keep.end * _TOKEN_BYTES :]
        below = keep.children.get(self._child_key(keep, rest, salt))
        if below is None:
            return empty_pages()
        if below.locks:
            raise ValueError("a prefix that is to be forgotten is locked")
        nodes = list(self._subtree(below))
        for node in reversed(nodes):  # children before their parents
            self._drop_tail(node, len(node.pages))
        return self._report_removed(np.concatenate([node.pages for node in nodes]))

    def reset(self) -> Int32Array:
        pages = self._evict(self.evictable_pages)
        if self._cached > 0:
            return self._report_removed(pages)
        for observer in self._observers:
            observer.cleared()
        return pages

    def _report_removed(self, removed: Int32Array) -> Int32Array:
        """Tell the observers that these pages are no longer cached; return them."""
        if len(removed) > 0:
            for observer in self._observers:
                observer.removed(removed)
        return removed

    def _drop_tail(self, leaf: _Node, num_pages: int) -> None:
        """Remove the last pages of a leaf, and the leaf itself if it has no others."""
        self._cached -= num_pages
        if num_pages < len(leaf.pages):
            leaf.tokens = leaf.tokens[: -num_pages * self._page_bytes]
            leaf.pages = leaf.pages[:-num_pages]
            leaf.end -= num_pages * self.page_size
        else:
            assert leaf.parent is not None
            del leaf.parent.children[leaf.key]
            del self._queue[leaf]
            leaf.parent, leaf.end = None, _GONE

    # ---- showing ----

    def tree(self, max_nodes: int) -> list[CacheNode]:
        order = count()  # among nodes of equal size the first found comes first
        found: list[CacheNode] = []
        heap = [(-len(node.pages), next(order), node) for node in self._newest(self._root)]
        heapq.heapify(heap)
        while heap and len(found) < max_nodes:
            *_, node = heapq.heappop(heap)
            parent = node.parent
            above = None if parent is None or parent is self._root else int(parent.pages[-1])
            first, last = int(node.pages[0]), int(node.pages[-1])
            found.append(CacheNode(first, last, above, len(node.pages), node.end, node.locks))
            for child in self._newest(node):
                heapq.heappush(heap, (-len(child.pages), next(order), child))
        return found

    def _newest(self, node: _Node) -> list[_Node]:
        return list(islice(reversed(node.children.values()), _LOOKED_AT))

    # ---- checking ----

    def owned_pages(self) -> Int32Array:
        return np.concatenate([empty_pages(), *(node.pages for node in self._nodes())])

    def check(self) -> None:
        nodes = list(self._nodes())
        place = {node: i for i, node in enumerate(self._queue)}
        for node in nodes:
            self._check_run(node)
            below = sum(child.locks for child in node.children.values())
            require(node.locks >= below, f"a node has {node.locks} locks, its children have {below}")
            require((node.locks == 0) == (node in place), "a node is queued and locked, or neither")
        unlocked = [node for node in nodes if node.locks == 0]
        require(len(place) == len(unlocked), f"{len(place)} nodes are queued, {len(unlocked)} in the tree are unlocked")
        for node in unlocked:
            require(all(place[child] < place[node] for child in node.children.values()), "a child follows its parent")

        owned = self.owned_pages()
        require(len(np.unique(owned)) == len(owned), "a page is in the tree twice")
        require(self._cached == len(owned), f"{self._cached} pages are counted, {len(owned)} are in the tree")
        locked = sum(len(node.pages) for node in nodes if node.locks > 0)
        require(self._locked == locked, f"{self._locked} locked pages are counted, {locked} are in the tree")

    def _check_run(self, node: _Node) -> None:
        parent = node.parent
        if parent is None or parent.children.get(node.key) is not node:
            raise BrokenInvariant("a node's parent does not have it under its key")
        first = self._first_page(node.tokens)
        require(node.key.endswith(first), "a node's key does not end with its first page")
        require(node.key == first or parent is self._root, "a node below another has a salt")
        require(len(node.pages) > 0, "a node is empty")
        require(len(node.tokens) == len(node.pages) * self._page_bytes, "a node's tokens do not fill its pages")
        require(node.end == parent.end + len(node.pages) * self.page_size, "a node does not end where its path does")

    def _nodes(self) -> Iterator[_Node]:
        """Yield all nodes but the root."""
        for child in list(self._root.children.values()):
            yield from self._subtree(child)

    def _subtree(self, top: _Node) -> Iterator[_Node]:
        """Yield a node and all below it, parents first, without recursion: a long conversation is a deep tree."""
        stack = [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

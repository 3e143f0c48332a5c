"""Snapshots of a hybrid model's states: when a running request's state is saved, and where an entering one resumes.

A state exists only at the end of a row of a step, so a snapshot costs a chunk that ends there. It is saved before the
next step, by a copy in that step's plan. The device executes plans in order, so the host's records need not wait for
the copy: an entry may be given to another snapshot at once.

All snapshots are at ends of pages, and at least `distance` tokens apart: computing fewer tokens again takes no longer
than the step that a snapshot adds (12 ms for Qwen3.5-9B on an H200, as for 500 tokens). They are saved

- where prompts diverge: at the end of a prefix in the tree that has none, and at the end of the prefix that a waiting
  request shares with a prompt that is being prefilled;
- at each multiple of SPACING distances in a prompt, for prompts that will diverge from it;
- at the end of a prompt's last whole page, for the same prompt or one that extends it;
- at each multiple of the distance in an answer, the last of which is kept for the conversation's next turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import Batch, IndexArray, Int32Array, pages_for
from minisgl.kvcache.base import CacheHandle
from minisgl.kvcache.snapshots import SnapshotStore
from minisgl.scheduler.requests.request import Awaited, Request
from minisgl.scheduler.requests.request_pages import RequestPages
from minisgl.scheduler.requests.table import SlotTable, common_length

SPACING = 8  # distances; K and V of so many tokens take somewhat more memory than a snapshot
_NOWHERE = -1


@dataclass(slots=True)
class _Row:
    """Snapshots that a slot's request has saved and will save."""

    last: int  # position of its latest snapshot, saved or due, or of the snapshot from which it began
    branches: list[int] = field(default_factory=list)  # positions where another prompt diverges from this one
    answer_page: int = _NOWHERE  # last page before the answer's snapshot


class StateSnapshots:
    """Decides where snapshots are saved, and sets `table.stop` so that chunks of running requests end there.

    Row `num_slots + 1 + entry` of the device's states is the snapshot in that entry of the store.
    """

    def __init__(
        self,
        store: SnapshotStore,
        pages: RequestPages,
        table: SlotTable,
        *,
        distance: int,
    ) -> None:
        self.store = store
        self._pages = pages
        self._table = table
        self._page_size = table.page_size
        # A distance above max_seq_len might not fit the table's int32 positions.
        self._distance = pages_for(min(distance, table.max_seq_len), table.page_size) * table.page_size
        self._spacing = SPACING * self._distance
        self._rows = [_Row(0) for _ in range(table.num_slots)]
        self._first = table.num_slots + 1  # row of entry 0, after the slots and the scratch slot
        self._due: dict[int, int] = {}  # slot whose state the next plan must save -> its position
        self._copies: list[tuple[int, int]] = []  # (from row, to row), for the next plan

    # --- requests enter -----------------------------------------------------------------------------------------

    def enter(self, request: Request, prefix: CacheHandle) -> None:
        """Restore the snapshot at the end of an entering request's prefix; the request has its slot."""
        slot = request.slot
        row = self._rows[slot] = _Row(prefix.cached_len)
        if prefix.cached_len:
            entry = self.store.use(int(prefix.pages[-1]))
            self._copies.append((self._first + entry, slot))
        row.branches.append(self._pages.cached_len(request))
        self._plan(slot, prefix.cached_len)

    def coming(self, request: Request, cached_len: int, running: IndexArray) -> Awaited | None:
        """Return a longer prefix of a request of which a running one will save a snapshot; None if there is none.

        If the two share a prefix that is still to be computed, this requests a snapshot at its end.
        """
        table, least = self._table, cached_len + self._distance
        tokens = request.token_ids[:-1]
        for slot in table.prefilling(running):
            known = table.tokens[slot, : min(int(table.entry_len[slot]) - 1, len(tokens))]
            if len(known) < least or not request.may_wait_for(other := table.request(slot)):
                continue
            if not np.array_equal(known[:least], tokens[:least]):  # cheap test: most prompts diverge early
                continue
            common = common_length(known, tokens) // self._page_size * self._page_size
            position = self._next_snapshot(slot, least, common)
            if position is not None:
                return Awaited(other.seq_id, position)
        return None

    def _next_snapshot(self, slot: int, least: int, most: int) -> int | None:
        """Return where the slot's request will save a snapshot between `least` and `most`, near the latter; or None."""
        row, computed = self._rows[slot], int(self._table.cached_len[slot])
        if least <= self._due.get(slot, _NOWHERE) <= most:
            return self._due[slot]
        planned = [point for point in (*row.branches, self._prompt_end(slot)) if point > computed]
        near = [point for point in planned if max(least, most - self._distance) < point <= most]
        if near:
            return min(near)
        if most <= computed + 1 or most < row.last + self._distance:  # already computed, or too near to the last one
            return None
        row.branches.append(most)
        self._plan(slot, computed)
        return most

    # --- steps are planned --------------------------------------------------------------------------------------

    def advance(self, slots: IndexArray, new_len: Int32Array) -> None:
        """Record the lengths that the rows of a planned step will have."""
        for slot in slots[new_len == self._table.stop[slots]].tolist():
            row, position = self._rows[slot], int(self._table.stop[slot])
            self._due[slot] = row.last = position
            self._plan(slot, position)

    def save(self, num_running: int) -> None:
        """Add copies to the next plan for running requests that have reached the position of a snapshot."""
        due, self._due = self._due, {}
        for slot, position in due.items():
            if self._table.live[slot] and position <= self._table.known_len[slot]:
                self._save(slot, position, crowded=2 * num_running > self.store.num_entries)

    def _save(self, slot: int, position: int, *, crowded: bool) -> None:
        row, request = self._rows[slot], self._table.request(slot)
        in_answer = position > self._prompt_end(slot)
        if in_answer and crowded:
            return  # snapshots of answers would evict those that prompts share
        page = self._pages.share_prefix(request, position)
        if page is None:
            return
        if in_answer:
            if row.answer_page != _NOWHERE:
                self.store.discard(row.answer_page)
            # The request's own page stays locked until it ends, so its number stays valid.
            is_own = int(self._table.pages[slot, position // self._page_size - 1]) == page
            row.answer_page = page if is_own else _NOWHERE
        if page not in self.store:
            self._copies.append((slot, self._first + self.store.add(page)))
            self._pages.snapshot_saved(request, position, page)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies for the next plan, in order."""
        copies, self._copies = self._copies, []
        return copies

    def _plan(self, slot: int, position: int) -> None:
        """Set `table.stop` to the row's next snapshot after `position`, at which its last step ended or will end."""
        row, end = self._rows[slot], self._prompt_end(slot)
        least = max(row.last + self._distance, position + 1)
        points = [point for point in (*row.branches, end) if point >= least]
        if (waypoint := _next_multiple(least, self._spacing)) <= end:
            points.append(waypoint)
        self._table.stop[slot] = min(points, default=_next_multiple(max(least, end + 1), self._distance))

    def _prompt_end(self, slot: int) -> int:
        """Return the end of the last whole page of the tokens that a request entered with, without the last token."""
        return (int(self._table.entry_len[slot]) - 1) // self._page_size * self._page_size

    # --- steps fail ---------------------------------------------------------------------------------------------

    def take_back(self, batches: Iterable[Batch]) -> None:
        """Discard the snapshots that plans which were not executed should have saved, and those for the next plan."""
        copies = [pair for batch in batches for pair in batch.state_copies] + self.take_copies()
        self.store.discard_entries(target - self._first for _, target in copies if target >= self._first)

    def counts(self) -> dict[str, int]:
        """Return the number of snapshots, and totals since the start, for /server_info."""
        return {
            "snapshots": self.store.num_used,
            "snapshot_entries": self.store.num_entries,
            "snapshot_hits": self.store.hits,
            "snapshots_saved": self.store.saved,
            "snapshots_evicted": self.store.evicted,
        }


def _next_multiple(least: int, step: int) -> int:
    return -(-least // step) * step

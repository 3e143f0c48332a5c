"""State of all running requests on the device, as tensors indexed by slot.

The host sends only differences: a row when a request enters, page numbers when it crosses a page boundary. A step reads
its input tokens here and writes the sampled ones here, so the next step can be launched before the host knows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Batch, Int32Array, NewRow, pages_for
from minisgl.engine.logits_tables import ProcessingTables
from minisgl.sampling_params import MIN_TEMPERATURE
from minisgl.uploads import upload


class SlotState:
    """Rows for `num_slots` requests, and one for the scratch slot of a graph's padding rows."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_seq_len: int,
        page_size: int,
        scratch_page: int,
        device: torch.device,
        scratch_window_page: int | None = None,
    ) -> None:
        """`scratch_window_page`: scratch page of the windowed group, which has a page table of its own, if any."""
        rows = num_slots + 1
        self.device = device
        self.scratch_slot = num_slots
        self.max_seq_len = max_seq_len
        self.page_size = page_size
        self.tokens = torch.zeros((rows, max_seq_len), dtype=torch.int32, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int32, device=device)  # known tokens, the sampled one included
        self.page_table = torch.full(
            (rows, pages_for(max_seq_len, page_size)), scratch_page, dtype=torch.int32, device=device
        )
        self.window_table: Tensor | None = None
        if scratch_window_page is not None:
            self.window_table = torch.full_like(self.page_table, scratch_window_page)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)  # 0: greedy
        # Temperature of processed log-probabilities: with top_k 1 the choice is greedy, but the temperature counts.
        self.logprob_temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)  # 0: no limit
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.processing = ProcessingTables(rows, device)

    def apply(self, batch: Batch) -> None:
        """Write the plan's new rows and new pages."""
        if batch.new_rows:
            self._enter(batch.new_rows)
        if len(batch.new_pages):
            self._write(self.page_table, batch.new_pages[:, :3])
            if self.window_table is not None:
                self._write(self.window_table, batch.new_pages[:, [0, 1, 3]])

    def _enter(self, rows: Sequence[NewRow]) -> None:
        """Write all rows at once, because each launch takes the host the same time for any number of rows."""
        params = [row.sampling for row in rows]
        integers = [
            [row.slot for row in rows],
            [len(row.token_ids) for row in rows],
            [max(one.top_k, 0) for one in params],
            [row.seed for row in rows],
        ]
        slots, lengths, top_k, seeds = upload(np.array(integers, dtype=np.int64), self.device)
        self.lengths[slots] = lengths.int()
        self.top_k[slots] = top_k.int()
        self.seed[slots] = seeds
        floats = [
            [0.0 if one.greedy else one.temperature for one in params],
            [one.top_p for one in params],
            [one.min_p for one in params],
            [1.0 if one.temperature < MIN_TEMPERATURE else one.temperature for one in params],
        ]
        temperature, top_p, min_p, logprob_temperature = upload(np.array(floats, dtype=np.float32), self.device)
        self.temperature[slots] = temperature
        self.logprob_temperature[slots] = logprob_temperature
        self.top_p[slots] = top_p
        self.min_p[slots] = min_p
        self._write(self.tokens, _beginnings([(row.slot, row.token_ids) for row in rows]))
        if any(len(row.pages) for row in rows):
            self._write(self.page_table, _beginnings([(row.slot, row.pages) for row in rows]))
            windowed = [(row.slot, row.window_pages) for row in rows if row.window_pages is not None]
            if self.window_table is not None and windowed:
                self._write(self.window_table, _beginnings(windowed))
        for row in rows:
            self.processing.enter(row)

    def _write(self, table: Tensor, entries: Int32Array) -> None:
        """Write entries [k, 3] (slot, index in its row, value), no entry twice."""
        indices = entries[:, 0].astype(np.int64) * table.shape[1] + entries[:, 1]
        sent_indices, sent_values = upload(np.stack([indices, entries[:, 2]]), self.device)
        table.view(-1).scatter_(0, sent_indices, sent_values.view(torch.int32)[::2])  # the low half of each

    def out_cache_loc(self, page_table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the locations [T] int64 of slots and positions [T] in a group's pool: page * page_size + offset."""
        pages = page_table[slots, positions // self.page_size]
        return pages.long() * self.page_size + positions % self.page_size

    def advance(self, slots: Tensor, sampled: Tensor) -> None:
        """Append the sampled tokens [S] int32 to the slots [S] int64, for the next step to read.

        Slots may repeat only as scratch.
        """
        lengths = self.lengths[slots]
        real = (slots != self.scratch_slot).int()
        # The scratch slot, whose length is always 1, overwrites its first entry.
        self.tokens[slots, lengths.long() * real] = sampled
        self.lengths[slots] = lengths + real


def _beginnings(rows: Sequence[tuple[int, Int32Array]]) -> Int32Array:
    """Return [k, 3] (slot, index, value) for the values at the start of each slot's row."""
    lengths = [len(values) for _, values in rows]
    owners = np.repeat(np.array([slot for slot, _ in rows], dtype=np.int32), lengths)
    indices = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return np.stack([owners, indices, np.concatenate([values for _, values in rows])], axis=1)

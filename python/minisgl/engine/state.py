"""What the device knows of every running request: tensors indexed by slot.

The host sends differences only: a row when a request enters, page ids when it crosses a page boundary. A step reads
its input tokens here and leaves the sampled ones here, so the next step can be launched before the host has seen them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import Batch, EnteringRow, pages_for
from minisgl.engine.processing import ProcessingState


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a host array to the device in stream order, without waiting."""
    return pinned(array).to(device, non_blocking=True) if device.type == "cuda" else torch.from_numpy(array)


def pinned(array: NDArray[np.generic]) -> Tensor:
    """A copy that the device may read while the host goes on. Torch keeps its memory until copies from it are done."""
    tensor = torch.empty_like(torch.from_numpy(array), pin_memory=True)
    np.copyto(tensor.numpy(), array)  # torch's copy of a large array would wake all its threads
    return tensor


class SlotState:
    """Rows for `num_slots` requests and one more, the scratch slot, that padding rows of a graph name."""

    def __init__(
        self, *, num_slots: int, max_seq_len: int, page_size: int, scratch_page: int, device: torch.device
    ) -> None:
        rows = num_slots + 1
        self.device = device
        self.scratch_slot = num_slots
        self.page_size = page_size
        self.tokens = torch.zeros((rows, max_seq_len), dtype=torch.int32, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int32, device=device)  # known tokens, the sampled one included
        self.page_table = torch.full(
            (rows, pages_for(max_seq_len, page_size)), scratch_page, dtype=torch.int32, device=device
        )
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)  # 0: no limit
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.processing = ProcessingState(rows, device)

    def apply(self, batch: Batch) -> None:
        """Bring the rows up to date for this step."""
        for row in batch.entering:
            self._enter(row)
        if len(batch.new_pages):
            change = upload(batch.new_pages.T.astype(np.int64), self.device)
            self.page_table[change[0], change[1]] = change[2].int()

    def _enter(self, row: EnteringRow) -> None:
        slot, sampling = row.slot, row.sampling
        self.tokens[slot, : len(row.token_ids)] = upload(row.token_ids, self.device)
        if len(row.pages):
            self.page_table[slot, : len(row.pages)] = upload(row.pages, self.device)
        self.lengths[slot] = len(row.token_ids)
        self.temperature[slot] = 0.0 if sampling.greedy else sampling.temperature
        self.top_k[slot] = max(sampling.top_k, 0)
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = row.seed
        self.processing.enter(row)

    def kv_slots(self, slots: Tensor, positions: Tensor) -> Tensor:
        """[T] slots and positions -> [T] int64 places in the KV pool."""
        pages = self.page_table[slots, positions // self.page_size]
        return pages.long() * self.page_size + positions % self.page_size

    def advance(self, slots: Tensor, sampled: Tensor) -> None:
        """Append the sampled token of each slot: the next step reads it from here. Slots may repeat only as scratch."""
        lengths = self.lengths[slots]
        real = (slots != self.scratch_slot).int()
        # The scratch slot, of length 1 for ever, writes its first place again and again.
        self.tokens[slots, lengths.long() * real] = sampled.int()
        self.lengths[slots] = lengths + real

"""Tables of the parameters for the processing of logits, on the device, indexed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import NewRow
from minisgl.sampling_params import MAX_BAD_WORD_TOKENS
from minisgl.uploads import upload

NO_ID = -1  # fills the rest of the tables' rows


class ProcessingTables:
    """Tables of the parameters for the processing of logits. Rows of slots without parameters are neutral.

    Tables grow to the widest row that was ever needed, instead of the size of the vocabulary.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        self.prompt_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.presence_penalty = torch.zeros(rows, dtype=torch.float32, device=device)
        self.frequency_penalty = torch.zeros(rows, dtype=torch.float32, device=device)
        self.repetition_penalty = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.stop_ids = self._table(rows, 0)  # [rows, n]: ids that are forbidden until min_tokens
        self.bias_ids = self._table(rows, 0)  # [rows, n], each id once
        self.biases = torch.zeros((rows, 0), dtype=torch.float32, device=device)  # [rows, n]
        # [rows, n, MAX_BAD_WORD_TOKENS]: each word ends in the last column; NO_ID before it matches any token.
        self.bad_words = self._table(rows, 0, MAX_BAD_WORD_TOKENS)
        self.is_restricted = torch.zeros(rows, dtype=torch.bool, device=device)  # only ids of `allowed` may be chosen
        self.allowed = torch.zeros((rows, 0), dtype=torch.int32, device=device)  # bit i of word w: id 32 w + i
        self._used: set[int] = set()  # slots whose rows are not neutral

    def _table(self, *shape: int) -> Tensor:
        return torch.full(shape, NO_ID, dtype=torch.int32, device=self.device)

    def enter(self, row: NewRow) -> None:
        """Write the slot's rows for an entering request."""
        if row.slot in self._used:
            self._clear(row.slot)
            self._used.remove(row.slot)  # after `_clear`, which may run out of memory and be repeated
        if row.sampling.processed:
            self._used.add(row.slot)
            self._set(row)

    def _clear(self, slot: int) -> None:
        for table, neutral in (
            (self.presence_penalty, 0.0),
            (self.frequency_penalty, 0.0),
            (self.repetition_penalty, 1.0),
            (self.min_tokens, 0),
            (self.stop_ids, NO_ID),
            (self.bias_ids, NO_ID),
            (self.bad_words, NO_ID),
            (self.is_restricted, False),
        ):
            table[slot] = neutral

    def _set(self, row: NewRow) -> None:
        slot, sampling = row.slot, row.sampling
        self.prompt_lens[slot] = row.prompt_len
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.min_tokens[slot] = sampling.min_tokens
        if row.stop_ids:
            self.stop_ids = _widened(self.stop_ids, len(row.stop_ids), NO_ID)
            self._write(self.stop_ids, slot, np.array(row.stop_ids, dtype=np.int32))
        if sampling.logit_bias:
            biases = dict(sampling.logit_bias)
            wide = _widened(self.bias_ids, len(biases), NO_ID), _widened(self.biases, len(biases), 0.0)
            self.bias_ids, self.biases = wide  # together, because each allocation may run out of memory
            self._write(self.bias_ids, slot, np.array(list(biases), dtype=np.int32))
            self._write(self.biases, slot, np.array(list(biases.values()), dtype=np.float32))
        if sampling.bad_words_ids:
            words = _right_aligned(sampling.bad_words_ids)
            self.bad_words = _widened(self.bad_words, len(words), NO_ID)
            self._write(self.bad_words, slot, words)
        if sampling.allowed_token_ids is not None:
            bits = _bitmask(sampling.allowed_token_ids)
            self.allowed = _widened(self.allowed, len(bits), 0)
            self.allowed[slot] = 0
            self._write(self.allowed, slot, bits)
            self.is_restricted[slot] = True

    def _write(self, table: Tensor, slot: int, values: NDArray[np.generic]) -> None:
        table[slot, : len(values)] = upload(values, self.device)


def _widened(table: Tensor, width: int, fill: float) -> Tensor:
    """Return the table with room for at least `width` entries in each row."""
    if table.shape[1] >= width:
        return table
    wide = torch.full(
        (table.shape[0], 1 << (width - 1).bit_length(), *table.shape[2:]), fill, dtype=table.dtype, device=table.device
    )
    wide[:, : table.shape[1]] = table
    return wide


def _right_aligned(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the words' ids [n, MAX_BAD_WORD_TOKENS], right-aligned, with NO_ID before them."""
    table = np.full((len(words), MAX_BAD_WORD_TOKENS), NO_ID, dtype=np.int32)
    for row, word in zip(table, words, strict=True):
        row[MAX_BAD_WORD_TOKENS - len(word) :] = word
    return table


def _bitmask(ids: Sequence[int]) -> NDArray[np.int32]:
    """Return a bitmask in int32 words, lowest ids first, with the bits of these ids set."""
    bits = np.zeros((max(ids) // 32 + 1) * 32, dtype=np.uint8)
    bits[np.asarray(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")

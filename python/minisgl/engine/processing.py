"""Logits that change before the temperature: forbidden ids, biases and penalties.

The parameters are in tables on the device, indexed by slot (`ProcessingState`). All that depends on the tokens so far
(the penalties' counts, the beginnings of bad words, the number of output tokens) is read from `SlotState.tokens` in
each step: nothing is counted along, so a request that re-enters after a retraction brings all of it with its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import MAX_BAD_WORD_TOKENS, NewRow
from minisgl.uploads import upload

if TYPE_CHECKING:
    from minisgl.engine.state import SlotState

NO_ID = -1  # fills the tables' rows
# Finite, so that a row whose every id is forbidden has a distribution all the same, and in this order: bad words and
# min_tokens give way where the grammar and the allowed ids leave nothing else.
AVOIDED = -1e30
EXCLUDED = -2e30
_PIECE_ELEMENTS = 2**23  # of temporary tensors


class ProcessingState:
    """Tables of the parameters that change logits. Rows of slots without any are neutral.

    They grow to the widest row that was ever wanted; none has slots x vocabulary entries.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        self.prompt_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.presence_penalty = torch.zeros(rows, dtype=torch.float32, device=device)
        self.frequency_penalty = torch.zeros(rows, dtype=torch.float32, device=device)
        self.repetition_penalty = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.stop_ids = self._table(rows, 0)  # [rows, n]: forbidden until min_tokens
        self.bias_ids = self._table(rows, 0)  # [rows, n], each id once
        self.biases = torch.zeros((rows, 0), dtype=torch.float32, device=device)  # [rows, n]
        # [rows, n, MAX_BAD_WORD_TOKENS]: each word ends in the last column; NO_ID before it stands for any token.
        self.bad_words = self._table(rows, 0, MAX_BAD_WORD_TOKENS)
        self.is_restricted = torch.zeros(rows, dtype=torch.bool, device=device)  # to the ids of `allowed`
        self.allowed = torch.zeros((rows, 0), dtype=torch.int32, device=device)  # bit i of word w: id 32 w + i
        self._used: set[int] = set()  # slots whose rows are not neutral

    def _table(self, *shape: int) -> Tensor:
        return torch.full(shape, NO_ID, dtype=torch.int32, device=self.device)

    def enter(self, row: NewRow) -> None:
        """Bring the slot's rows up to date."""
        if row.slot in self._used:
            self._clear(row.slot)
            self._used.remove(row.slot)  # in this order: a step that finds no memory leaves off anywhere
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
            self.bias_ids, self.biases = wide  # both or none
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
    """Return the table with room for `width` entries a row."""
    if table.shape[1] >= width:
        return table
    wide = torch.full(
        (table.shape[0], 1 << (width - 1).bit_length(), *table.shape[2:]), fill, dtype=table.dtype, device=table.device
    )
    wide[:, : table.shape[1]] = table
    return wide


def _right_aligned(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the words' ids [n, MAX_BAD_WORD_TOKENS], with NO_ID before them."""
    table = np.full((len(words), MAX_BAD_WORD_TOKENS), NO_ID, dtype=np.int32)
    for row, word in zip(table, words, strict=True):
        row[MAX_BAD_WORD_TOKENS - len(word) :] = word
    return table


def _bitmask(ids: Sequence[int]) -> NDArray[np.int32]:
    """Return words of 32 bits, the lowest first, in which the ids' bits are set."""
    bits = np.zeros((max(ids) // 32 + 1) * 32, dtype=np.uint8)
    bits[np.asarray(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def unpack_bits(bitmask: Tensor, vocab: int) -> Tensor:
    """Unpack an int32 bitmask [S, words] to bool [S, vocab]; words that are not there count as 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    bits = ((bitmask.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :vocab]
    return torch.nn.functional.pad(bits, (0, vocab - bits.shape[1]))


def mask_logits(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Return a float32 copy of logits [S, V] without what the bitmask [S, ceil(V / 32)] does not allow."""
    return logits.float().masked_fill(~unpack_bits(bitmask, logits.shape[1]), EXCLUDED)


def process_logits(logits: Tensor, slots: Tensor, state: SlotState, bitmask: Tensor | None) -> Tensor:
    """Return a float32 copy of logits [S, V], changed as each row's parameters say; `bitmask` as in `mask_logits`."""
    vocab = logits.shape[1]
    processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    piece = max(_PIECE_ELEMENTS // max(vocab, state.tokens.shape[1]), 1)
    for begin in range(0, len(slots), piece):
        rows = slice(begin, begin + piece)
        processed[rows] = _process_rows(
            logits[rows].float(), slots[rows], state, None if bitmask is None else bitmask[rows]
        )
    return processed


def _process_rows(logits: Tensor, slots: Tensor, state: SlotState, bitmask: Tensor | None) -> Tensor:
    tables, vocab = state.processing, logits.shape[1]
    lengths, prompt_lens = state.lengths[slots].unsqueeze(1), tables.prompt_lens[slots].unsqueeze(1)
    tokens = state.tokens[slots].long()  # [S, L]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    is_known = place < lengths
    is_output = is_known & (place >= prompt_lens)

    def per_id(ids: Tensor, wanted: Tensor, values: Tensor) -> Tensor:
        """Return float32 [S, V]: by id the sum of the values [S, n] at its places in ids [S, n], where wanted."""
        sums = torch.zeros((len(slots), vocab + 1), device=logits.device)
        return sums.scatter_add_(1, torch.where(wanted, ids, vocab), values.expand(ids.shape))[:, :vocab]

    one = torch.ones((), device=logits.device)
    bias_ids = tables.bias_ids[slots].long()
    x = logits + per_id(bias_ids, bias_ids != NO_ID, tables.biases[slots])

    repetition = tables.repetition_penalty[slots].unsqueeze(1)
    x = torch.where(per_id(tokens, is_known, one) > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    counts = per_id(tokens, is_output, one)
    x = x - tables.frequency_penalty[slots].unsqueeze(1) * counts
    x = x - tables.presence_penalty[slots].unsqueeze(1) * (counts > 0)

    stop_ids = tables.stop_ids[slots].long()
    is_short = lengths - prompt_lens < tables.min_tokens[slots].unsqueeze(1)
    avoided = per_id(stop_ids, is_short & (stop_ids != NO_ID), one)
    words = tables.bad_words[slots].long()  # [S, n, MAX_BAD_WORD_TOKENS]
    begun = _has_begun(words[:, :, :-1], tokens, lengths.long(), prompt_lens)
    avoided += per_id(words[:, :, -1], begun & (words[:, :, -1] != NO_ID), one)
    x = x.masked_fill(avoided > 0, AVOIDED)

    is_excluded = tables.is_restricted[slots].unsqueeze(1) & ~unpack_bits(tables.allowed[slots], vocab)
    if bitmask is not None:
        is_excluded |= ~unpack_bits(bitmask, vocab)
    return x.masked_fill(is_excluded, EXCLUDED)


def _has_begun(beginnings: Tensor, tokens: Tensor, lengths: Tensor, prompt_lens: Tensor) -> Tensor:
    """Return bool [S, n]: the output ends in that one of the beginnings [S, n, k], which are right-aligned."""
    last = lengths + torch.arange(-beginnings.shape[2], 0, device=tokens.device)  # [S, k] places
    tail = torch.where(last >= prompt_lens, tokens.gather(1, last.clamp(min=0)), NO_ID - 1)
    matches: Tensor = ((beginnings == NO_ID) | (beginnings == tail.unsqueeze(1))).all(dim=2)
    return matches

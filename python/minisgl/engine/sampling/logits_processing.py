"""Processing of logits before the temperature: forbidden ids, biases and penalties.

The parameters are in tables on the device, indexed by slot (`engine.logits_tables`). Everything that depends on the
tokens so far (counts for penalties, beginnings of bad words, the number of output tokens) is computed from
`SlotState.tokens` in each step. No counts are kept, so a request that re-enters after a retraction needs only its
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.engine.logits_tables import NO_ID
from minisgl.engine.state import SlotState

# Finite, so that a row with every id forbidden still has a distribution. AVOIDED (bad words, min_tokens) is larger, so
# that such ids are chosen if the grammar and the allowed ids leave no others.
AVOIDED = -1e30
EXCLUDED = -2e30
_PIECE_ELEMENTS = 2**23  # size of temporary tensors


def unpack_bits(bitmask: Tensor, vocab: int) -> Tensor:
    """Return an int32 bitmask [S, words] as bool [S, vocab]; missing words count as 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    bits = ((bitmask.unsqueeze(2) >> shifts) & 1).bool().flatten(1)[:, :vocab]
    return torch.nn.functional.pad(bits, (0, vocab - bits.shape[1]))


def mask_logits(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Return a float32 copy of logits [S, V], with ids that the bitmask [S, ceil(V / 32)] forbids set to EXCLUDED."""
    return logits.float().masked_fill(~unpack_bits(bitmask, logits.shape[1]), EXCLUDED)


def process_logits(logits: Tensor, slots: Tensor, state: SlotState, bitmask: Tensor | None) -> Tensor:
    """Return a float32 copy of logits [S, V], processed with each row's parameters; `bitmask` as in `mask_logits`."""
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
    position = torch.arange(tokens.shape[1], device=tokens.device)
    is_known = position < lengths
    is_output = is_known & (position >= prompt_lens)

    def per_id(ids: Tensor, wanted: Tensor, values: Tensor) -> Tensor:
        """Return float32 [S, V]: the sum by id of the values [S, n] at those ids [S, n] that are `wanted`."""
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
    """Return bool [S, n]: True if the output ends with that beginning [S, n, k]; beginnings are right-aligned."""
    last = lengths + torch.arange(-beginnings.shape[2], 0, device=tokens.device)  # [S, k] positions
    tail = torch.where(last >= prompt_lens, tokens.gather(1, last.clamp(min=0)), NO_ID - 1)
    matches: Tensor = ((beginnings == NO_ID) | (beginnings == tail.unsqueeze(1))).all(dim=2)
    return matches

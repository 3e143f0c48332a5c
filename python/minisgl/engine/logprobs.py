"""Log-probabilities of tokens: the float32 log-softmax of logits, as the model gave them or as they were changed.

Rows are worked on in pieces, so that a long prompt takes no more memory than a short one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.core import Logprobs

_PIECE_ELEMENTS = 2**24  # of a piece's logits: 64 MiB in float32


def no_logprobs(device: torch.device) -> Logprobs[Tensor]:
    """Return the log-probabilities of no position."""
    ids = torch.empty((0, 0), dtype=torch.int32, device=device)
    values = torch.empty((0, 0), dtype=torch.float32, device=device)
    return Logprobs(values.flatten(), ids.flatten(), ids, values)


def compute_logprobs(logits: Callable[[slice], Tensor], tokens: Tensor, vocab: int, top: int) -> Logprobs[Tensor]:
    """Score tokens int64[n], with `top` alternatives each. `logits` makes the logits [rows, vocab] of a slice of them.

    The chosen token's value is read from the same row as the alternatives': where it is one of them, the same bits.
    """
    if len(tokens) == 0:
        return no_logprobs(tokens.device)
    rows = max(_PIECE_ELEMENTS // vocab, 1)
    pieces = [
        _of_piece(logits(slice(begin, begin + rows)), tokens[begin : begin + rows], min(top, vocab))
        for begin in range(0, len(tokens), rows)
    ]
    return Logprobs(*(torch.cat(columns) for columns in zip(*pieces, strict=True)))


def _of_piece(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits.float(), dim=1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    best = logprobs.topk(top, dim=1)
    ids = best.indices if top == 0 else _first_among_equals(best.indices, tokens, ranks)
    return chosen.squeeze(1), ranks.int(), ids.int(), best.values


def _first_among_equals(ids: Tensor, tokens: Tensor, ranks: Tensor) -> Tensor:
    """Alternatives [n, k] in which the chosen token comes before those as likely: 16-bit logits are often equal.

    Without it, a greedy token need not be the first of its alternatives, nor one of them at all.
    """
    token, place = tokens.unsqueeze(1), ranks.unsqueeze(1) - 1
    at = place.clamp(max=ids.shape[1] - 1)
    swapped = torch.where(ids == token, ids.gather(1, at), ids).scatter(1, at, token)
    return torch.where(place == at, swapped, ids)

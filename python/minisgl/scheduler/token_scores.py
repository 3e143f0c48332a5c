"""Log-probabilities on the host: plans which of them a step returns, and packs them for the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.core import AnyArray, BoolArray, IndexArray, Int32Array, Logprobs, SamplingFlags, ScoredTokens
from minisgl.message.types import LogprobRows, pack_ids
from minisgl.scheduler.table import SlotTable


def scored_tokens(
    table: SlotTable, slots: IndexArray, starts: Int32Array, ends: Int32Array, sampling_slots: IndexArray
) -> ScoredTokens | None:
    """Plan what the requests of a step ask for; its rows extend `slots` from `starts` to `ends`."""
    if SamplingFlags.LOGPROBS not in table.flags(slots):
        return None
    tops, prompt_tops = table.top_logprobs[sampling_slots], table.top_prompt_logprobs[slots]
    asks, prompt_asks = tops >= 0, prompt_tops >= 0
    if not asks.any() and not prompt_asks.any():
        return None
    # The last token of a prompt has no successor there.
    prompt_lens = np.minimum(ends, table.prompt_len[slots] - 1) - starts
    return ScoredTokens(
        rows=np.flatnonzero(asks).astype(np.int32),
        top=int(tops.max(initial=0)),
        prompt_lens=np.where(prompt_asks, np.maximum(prompt_lens, 0), 0).astype(np.int32),
        prompt_top=int(prompt_tops.max(initial=0)),
    )


def rows_of(logprobs: Logprobs[AnyArray], rows: slice | BoolArray, top: int) -> Logprobs[AnyArray]:
    """Select some of the positions, with the first `top` alternatives."""
    return Logprobs(logprobs.chosen[rows], logprobs.ranks[rows], logprobs.top_ids[rows, :top], logprobs.top[rows, :top])


def pack_logprobs(
    seq_ids: list[int], lengths: list[int], tops: list[int], tokens: Int32Array, parts: Sequence[Logprobs[AnyArray]]
) -> LogprobRows:
    """Pack the log-probabilities of tokens [n], which the parts have together, in the order of the sequences.

    A sequence has `lengths[i]` of the positions, and asks for `tops[i]` alternatives at each.
    """
    top_ids = np.concatenate([part.top_ids for part in parts])
    top = np.concatenate([part.top for part in parts])
    width = top.shape[1]  # at most the size of the vocabulary
    widths = np.minimum(tops, width)
    kept = np.arange(width) < np.repeat(widths, lengths)[:, None]
    return LogprobRows(
        seq_ids,
        lengths,
        widths.tolist(),
        pack_ids(tokens),
        np.concatenate([part.chosen for part in parts]).astype("<f4").tobytes(),
        pack_ids(np.concatenate([part.ranks for part in parts])),
        pack_ids(top_ids[kept]),
        top[kept].astype("<f4").tobytes(),
    )

"""Log-probabilities on the host: which a step is asked for, and their way onto the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.core import BoolArray, IndexArray, Int32Array, LogprobPlan, Logprobs
from minisgl.message.types import LogprobRows, pack_ids
from minisgl.scheduler.table import Asks, SlotTable


def plan_logprobs(
    table: SlotTable, slots: IndexArray, starts: Int32Array, ends: Int32Array, sampling_slots: IndexArray
) -> LogprobPlan | None:
    """What the requests of a step want to know; its rows extend `slots` from `starts` to `ends`."""
    if Asks.LOGPROBS not in table.asked(slots):
        return None
    tops, prompt_tops = table.top_logprobs[sampling_slots], table.top_prompt_logprobs[slots]
    asks, prompt_asks = tops >= 0, prompt_tops >= 0
    if not asks.any() and not prompt_asks.any():
        return None
    # The last token of a prompt has no successor there.
    prompt_lengths = np.minimum(ends, table.prompt_len[slots] - 1) - starts
    return LogprobPlan(
        rows=np.flatnonzero(asks).astype(np.int32),
        top=int(tops.max(initial=0)),
        prompt_lengths=np.where(prompt_asks, np.maximum(prompt_lengths, 0), 0).astype(np.int32),
        prompt_top=int(prompt_tops.max(initial=0)),
    )


def rows_of(logprobs: Logprobs, rows: slice | BoolArray, top: int) -> Logprobs:
    """Some of the positions, with the first `top` alternatives."""
    return Logprobs(logprobs.chosen[rows], logprobs.ranks[rows], logprobs.top_ids[rows, :top], logprobs.top[rows, :top])


def pack_logprobs(tokens: Int32Array, parts: Sequence[Logprobs]) -> LogprobRows:
    """Those of the tokens [n], which the parts have together."""
    return LogprobRows(
        pack_ids(tokens),
        np.concatenate([part.chosen for part in parts]).astype("<f4").tobytes(),
        pack_ids(np.concatenate([part.ranks for part in parts])),
        pack_ids(np.concatenate([part.top_ids for part in parts])),
        np.concatenate([part.top for part in parts]).astype("<f4").tobytes(),
    )

"""Log-probabilities on the host: chooses the tokens that a step scores, and packs their scores for the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.core import (
    NO_TOKEN,
    AnyArray,
    Batch,
    BoolArray,
    IndexArray,
    Int32Array,
    Logprobs,
    ScoredTokens,
    StepResult,
)
from minisgl.message.logprobs import LogprobRows
from minisgl.message.packed_ids import pack_ids
from minisgl.message.to_detokenizer import StepOutput
from minisgl.sampling_params import SamplingFlags
from minisgl.scheduler.requests.request import Request
from minisgl.scheduler.requests.table import SlotTable


def scored_tokens(
    table: SlotTable, slots: IndexArray, starts: Int32Array, ends: Int32Array, sampling_slots: IndexArray
) -> ScoredTokens | None:
    """Return the tokens to score in a step whose rows extend `slots` from `starts` to `ends`; None: there are none."""
    if SamplingFlags.LOGPROBS not in table.flags(slots):
        return None
    tops, prompt_tops = table.top_logprobs[sampling_slots], table.top_prompt_logprobs[slots]
    asks, prompt_asks = tops >= 0, prompt_tops >= 0
    if not asks.any() and not prompt_asks.any():
        return None
    # The last token of a prompt scores no other prompt token.
    prompt_lens = np.minimum(ends, table.prompt_len[slots] - 1) - starts
    return ScoredTokens(
        rows=np.flatnonzero(asks).astype(np.int32),
        top=int(tops.max(initial=0)),
        prompt_lens=np.where(prompt_asks, np.maximum(prompt_lens, 0), 0).astype(np.int32),
        prompt_top=int(prompt_tops.max(initial=0)),
    )


def rows_of(logprobs: Logprobs[AnyArray], rows: slice | BoolArray, top: int) -> Logprobs[AnyArray]:
    """Return some of the positions, with their first `top` alternatives."""
    return Logprobs(logprobs.chosen[rows], logprobs.ranks[rows], logprobs.top_ids[rows, :top], logprobs.top[rows, :top])


def pack_logprobs(
    seq_ids: list[int], lengths: list[int], tops: list[int], tokens: Int32Array, parts: Sequence[Logprobs[AnyArray]]
) -> LogprobRows:
    """Return the log-probabilities of tokens [n], concatenated from the parts, packed for the wire.

    Sequence `seq_ids[i]` has the next `lengths[i]` positions, and wants `tops[i]` alternatives at each.
    """
    top_ids = np.concatenate([part.top_ids for part in parts])
    top = np.concatenate([part.top for part in parts])
    width = top.shape[1]  # at most the size of the vocabulary
    widths = np.minimum(tops, width)
    kept = np.arange(width) < np.repeat(widths, lengths)[:, None]
    return LogprobRows(
        seq_ids=seq_ids,
        lengths=lengths,
        tops=widths.tolist(),
        tokens=pack_ids(tokens),
        logprobs=np.concatenate([part.chosen for part in parts]).astype("<f4").tobytes(),
        ranks=pack_ids(np.concatenate([part.ranks for part in parts])),
        top_tokens=pack_ids(top_ids[kept]),
        top_logprobs=top[kept].astype("<f4").tobytes(),
    )


def report_logprobs(
    output: StepOutput, table: SlotTable, batch: Batch, scored: ScoredTokens, result: StepResult[AnyArray]
) -> None:
    """Add a step's log-probabilities to the output; those of prompts are collected until the prompt is complete.

    Log-probabilities of requests that have ended since the step was planned are dropped.
    """
    slots = batch.slots[batch.needs_sample].astype(np.intp)
    live = table.live[slots[scored.rows]] & (result.tokens[scored.rows] != NO_TOKEN)
    if result.logprobs is not None and live.any():
        rows = scored.rows[live]
        output.logprobs = pack_logprobs(
            table.seq_id[slots[rows]].tolist(),
            [1] * len(rows),
            table.top_logprobs[slots[rows]].tolist(),
            result.tokens[rows],
            [rows_of(result.logprobs, live, scored.top)],
        )
    ends = np.cumsum(scored.prompt_lens)
    for row in np.flatnonzero(scored.prompt_lens).tolist():
        slot, end = int(batch.slots[row]), int(ends[row])
        if result.prompt_logprobs is not None and table.live[slot]:
            positions = slice(end - int(scored.prompt_lens[row]), end)
            part = rows_of(result.prompt_logprobs, positions, int(table.top_prompt_logprobs[slot]))
            table.request(slot).prompt_scores.append(part)
    # A prompt is complete when its row samples, which may be a step later than its last log-probabilities.
    for slot in slots[table.live[slots] & (table.top_prompt_logprobs[slots] >= 0)].tolist():
        report_prompt(output, table, table.request(slot))


def report_prompt(output: StepOutput, table: SlotTable, request: Request) -> None:
    """Add all log-probabilities of a prompt to the output, with the request's first token or its end."""
    tokens = request.token_ids[1 : request.prompt_len]
    top = int(table.top_prompt_logprobs[request.slot])
    output.prompt_logprobs.append(pack_logprobs([request.seq_id], [len(tokens)], [top], tokens, request.prompt_scores))
    request.prompt_scores.clear()
    request.prompt_scored = True
    table.top_prompt_logprobs[request.slot] = -1

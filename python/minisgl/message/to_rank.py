"""Scheduler of rank 0 -> schedulers of the other tensor-parallel ranks: the plan of each step, in order.

The mask of a plan that is `constrained` comes right behind it, when rank 0 has made it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from minisgl.core import Batch, EnteringRow, Int32Array, LogprobPlan, SamplingParams
from minisgl.message.types import PackedIds, pack_ids, unpack_ids


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """core.EnteringRow on the wire."""

    slot: int
    token_ids: PackedIds
    pages: PackedIds
    sampling: SamplingParams
    seed: int
    prompt_len: int
    stop_ids: tuple[int, ...]


class PlanLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """core.LogprobPlan on the wire."""

    rows: PackedIds
    top: int
    prompt_lengths: PackedIds
    prompt_top: int


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """core.Batch on the wire."""

    step: int
    slots: PackedIds
    starts: PackedIds
    lengths: PackedIds
    samples: bytes  # a byte a row
    new_pages: PackedIds  # (slot, index, page) after one another
    entering: list[PlanRow]
    greedy: bool
    filtered: bool
    processed: bool
    logprobs: PlanLogprobs | None
    constrained: bool


class Mask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tokens that the sampling rows of the plan before may choose."""

    rows: int
    words: PackedIds  # [rows, ceil(vocab_size / 32)], one row after the other


ToRank: TypeAlias = Plan | Mask


def pack_mask(mask: Int32Array) -> Mask:
    return Mask(len(mask), pack_ids(mask.ravel()))


def unpack_mask(mask: Mask) -> Int32Array:
    return unpack_ids(mask.words).reshape(mask.rows, -1)


def pack_plan(batch: Batch) -> Plan:
    return Plan(
        batch.step,
        pack_ids(batch.slots),
        pack_ids(batch.starts),
        pack_ids(batch.lengths),
        batch.samples.tobytes(),
        pack_ids(batch.new_pages.ravel()),
        [_pack_row(row) for row in batch.entering],
        batch.greedy,
        batch.filtered,
        batch.processed,
        None if batch.logprobs is None else _pack_logprobs(batch.logprobs),
        batch.constrained,
    )


def unpack_plan(plan: Plan) -> Batch:
    return Batch(
        step=plan.step,
        slots=unpack_ids(plan.slots),
        starts=unpack_ids(plan.starts),
        lengths=unpack_ids(plan.lengths),
        samples=np.frombuffer(plan.samples, dtype=np.bool_),
        new_pages=unpack_ids(plan.new_pages).reshape(-1, 3),
        entering=[_unpack_row(row) for row in plan.entering],
        greedy=plan.greedy,
        filtered=plan.filtered,
        processed=plan.processed,
        logprobs=None if plan.logprobs is None else _unpack_logprobs(plan.logprobs),
        constrained=plan.constrained,
    )


def _pack_row(row: EnteringRow) -> PlanRow:
    return PlanRow(
        row.slot,
        pack_ids(row.token_ids),
        pack_ids(row.pages),
        row.sampling,
        row.seed,
        row.prompt_len,
        row.stop_ids,
    )


def _unpack_row(row: PlanRow) -> EnteringRow:
    # Copies, because torch wants arrays that it may write to.
    return EnteringRow(
        row.slot,
        unpack_ids(row.token_ids).copy(),
        unpack_ids(row.pages).copy(),
        row.sampling,
        row.seed,
        row.prompt_len,
        row.stop_ids,
    )


def _pack_logprobs(plan: LogprobPlan) -> PlanLogprobs:
    return PlanLogprobs(pack_ids(plan.rows), plan.top, pack_ids(plan.prompt_lengths), plan.prompt_top)


def _unpack_logprobs(plan: PlanLogprobs) -> LogprobPlan:
    return LogprobPlan(unpack_ids(plan.rows), plan.top, unpack_ids(plan.prompt_lengths), plan.prompt_top)

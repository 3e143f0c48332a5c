"""Scheduler of rank 0 -> schedulers of the other tensor-parallel ranks: the plan of each step, in order."""

from __future__ import annotations

import msgspec
import numpy as np

from minisgl.core import Batch, EnteringRow, SamplingParams
from minisgl.message.types import PackedIds, pack_ids, unpack_ids


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """core.EnteringRow on the wire."""

    slot: int
    token_ids: PackedIds
    pages: PackedIds
    sampling: SamplingParams
    seed: int


class Plan(msgspec.Struct, frozen=True, array_like=True):
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


def pack_plan(batch: Batch) -> Plan:
    return Plan(
        batch.step,
        pack_ids(batch.slots),
        pack_ids(batch.starts),
        pack_ids(batch.lengths),
        batch.samples.tobytes(),
        pack_ids(batch.new_pages.ravel()),
        [
            PlanRow(row.slot, pack_ids(row.token_ids), pack_ids(row.pages), row.sampling, row.seed)
            for row in batch.entering
        ],
        batch.greedy,
        batch.filtered,
    )


def unpack_plan(plan: Plan) -> Batch:
    return Batch(
        step=plan.step,
        slots=unpack_ids(plan.slots),
        starts=unpack_ids(plan.starts),
        lengths=unpack_ids(plan.lengths),
        samples=np.frombuffer(plan.samples, dtype=np.bool_),
        new_pages=unpack_ids(plan.new_pages).reshape(-1, 3),
        # Copies, because torch wants arrays that it may write to.
        entering=[
            EnteringRow(
                row.slot, unpack_ids(row.token_ids).copy(), unpack_ids(row.pages).copy(), row.sampling, row.seed
            )
            for row in plan.entering
        ],
        greedy=plan.greedy,
        filtered=plan.filtered,
    )

"""Coefficients of a step's cost model: measured on a GPU, estimated for a CPU, whose first steps correct them.

Batches of the measurement have a prompt, decodes or both, of random text, whose K and V lie in pages of the real pool.
All ranks of a group run the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minisgl.attention.base import AttentionSpec
from minisgl.core import Batch, NewRow
from minisgl.sampling_params import SamplingParams
from minisgl.step_cost import StepCost

SMALL_CHUNK, LARGE_CHUNK = 256, 2048  # tokens between which a prompt's seconds are a line
LONG_CONTEXT = 8192  # tokens before a chunk
DECODES, DECODE_CONTEXT = 32, 2048  # rows, tokens before each
MANY_DECODES, MANY_CONTEXT = 256, 1024  # rows, tokens before each, in a step with a chunk
MIXED_TOKENS = 1024  # of a step with many decodes and a chunk
RUNS = 3  # of each step; the fastest counts

CPU_BYTES = 12e9  # bytes a second that a CPU reads
CPU_OPERATIONS = 2e11  # operations a second of a CPU's matrix products
CPU_ATTENTION = 2e10  # operations a second of a CPU's attention

MIN_TOKEN_SECONDS = 1e-9  # of a token of a prompt, so that budgets stay finite


def estimate_cost(weight_bytes: int, weights_per_token: int, specs: Sequence[AttentionSpec]) -> StepCost:
    """Return the likely cost on a CPU: weights are read once, each token takes `weights_per_token` products."""
    token = 2 * weights_per_token / CPU_OPERATIONS
    context = sum(4 * spec.num_heads * spec.head_dim for spec in specs) / CPU_ATTENTION
    return StepCost(
        prefill_token=token,
        prefill_context=context,
        decode_row=token,
        decode_context=context,
        fixed=weight_bytes / CPU_BYTES,
    )


def measure_cost(
    seconds_of: Callable[[Sequence[Batch]], Sequence[float]],
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    vocab_size: int,
    max_seq_len: int,
    max_prefill_tokens: int,
    num_window_pages: int | None = None,
) -> StepCost | None:
    """Return the coefficients from some steps, None if the engine is too small for them.

    `seconds_of` returns the device's seconds for steps that are launched one after another. `num_window_pages`: of a
    windowed group, if there is one.
    """
    pools = (num_pages,) if num_window_pages is None else (num_pages, num_window_pages)
    steps = _RandomSteps(np.random.default_rng(0), vocab_size, pools, page_size)
    large = min(LARGE_CHUNK, max_prefill_tokens, max_seq_len - 1)
    small = min(SMALL_CHUNK, large // 2)
    chunk_context = min(LONG_CONTEXT, max_seq_len - 1 - small)
    rows, context = min(DECODES, num_slots), min(DECODE_CONTEXT, max_seq_len - 2)
    if small < 2 or chunk_context < 1 or context < 2:
        return None
    many = _ManyDecodes(min(MANY_DECODES, num_slots - 1), min(MANY_CONTEXT, max_seq_len - 2), min(MIXED_TOKENS, large))
    # Short steps are launched after a long prompt, so that the device never waits for the host, which may need longer
    # to launch a step than the device to run it.
    series: list[tuple[Batch, ...]] = [
        (steps.plan(1, 0, large), steps.plan(1, 0, small), steps.plan(rows, 1, 1)),
        (steps.plan(1, 0, large), steps.plan(1, chunk_context, small), steps.plan(rows, context, 1)),
    ]
    if many.fits:
        series.append((steps.plan(1, 0, large), *many.plan(steps)))
    # The runs of a kind are spread over rounds, so that a short disturbance does not affect all of them.
    rounds = [[seconds_of(batches) for batches in series] for _ in range(RUNS)]
    fastest = [list(map(min, zip(*runs, strict=True))) for runs in zip(*rounds, strict=True)]
    (first, short_prompt, decodes), (second, later_chunk, long_decodes), *of_many = fastest
    attended = max((later_chunk - short_prompt) / (small * chunk_context), 0.0)
    # Seconds of two lengths of prompts, less their attention: two points of a line.
    short, long = short_prompt - attended * small**2 / 2, min(first, second) - attended * large**2 / 2
    token = max((long - short) / (large - small), MIN_TOKEN_SECONDS)
    fixed = max(short - token * small, 0.0)
    if fixed > decodes:  # decodes have the fixed part, too, so the short prompt must have waited for the host
        fixed, token = decodes, max((long - decodes) / large, MIN_TOKEN_SECONDS)
    cost = StepCost(
        prefill_token=token,
        prefill_context=attended,
        decode_row=token,  # with a chunk, for which the weights are read anyway
        decode_context=max((long_decodes - decodes) / (rows * (context - 1)), 0.0),
        fixed=fixed,
    )
    return many.refine(cost, of_many[0][1:], rows, decodes) if of_many else cost


@dataclass(frozen=True, slots=True)
class _RandomSteps:
    """Plans of steps of random text. No two rows of a step share a page if there are enough."""

    random: np.random.Generator
    vocab_size: int
    pools: Sequence[int]  # number of pages of each group
    page_size: int

    def plan(self, rows: int, start_pos: int, query_len: int, chunk: int = 0) -> Batch:
        """Return a step of equal rows and the first `chunk` tokens of one more prompt.

        All rows enter in this step, because captured decodes read lengths and tokens from the slot state.
        """
        token_ids = list(self.random.integers(self.vocab_size, size=(rows, start_pos + query_len), dtype=np.int32))
        starts = [start_pos] * rows
        if chunk:
            token_ids.append(self.random.integers(self.vocab_size, size=chunk, dtype=np.int32))
            starts.append(0)
        known = np.array([len(ids) for ids in token_ids])
        pages = -(-known // self.page_size)
        slots = np.repeat(np.arange(len(known)), pages)
        numbers = np.arange(len(slots))
        indices = numbers - np.repeat(np.cumsum(pages) - pages, pages)
        groups = (numbers % num_pages for num_pages in self.pools)
        none = np.zeros(0, dtype=np.int32)
        begins = np.array(starts, dtype=np.int32)
        return Batch(
            step=0,
            slots=np.arange(len(known), dtype=np.int32),
            start_pos=begins,
            query_lens=(known - begins).astype(np.int32),
            needs_sample=np.ones(len(known), dtype=np.bool_),
            new_pages=np.stack([slots, indices, *groups], axis=1).astype(np.int32),
            new_rows=[NewRow(slot, ids, none, SamplingParams(), 0, len(ids)) for slot, ids in enumerate(token_ids)],
        )


@dataclass(frozen=True, slots=True)
class _ManyDecodes:
    """Measurement of many decodes, with a chunk and alone."""

    rows: int
    context: int  # tokens before each decode that runs with a chunk
    mixed_tokens: int  # of the step with a chunk

    @property
    def fits(self) -> bool:
        """True if the engine has room for so many decodes that they differ from few."""
        return self.rows >= 2 * DECODES and self.mixed_tokens >= 2 * self.rows

    def plan(self, steps: _RandomSteps) -> tuple[Batch, ...]:
        """Return a prompt, decodes with a chunk, as many tokens in all as the prompt has, and decodes alone."""
        with_chunk = steps.plan(self.rows, self.context, 1, chunk=self.mixed_tokens - self.rows)
        return steps.plan(1, 0, self.mixed_tokens), with_chunk, steps.plan(self.rows, 1, 1)

    def refine(self, cost: StepCost, seconds: Sequence[float], few: int, seconds_of_few: float) -> StepCost:
        """Return the coefficients with those of decodes, from the seconds of `plan` and of `few` decodes alone."""
        prompt, mixed, alone = seconds
        # Steps with equally many tokens: their products take equally long, at any clock rate of the GPU.
        chunk_attention = cost.prefill_context * (self.mixed_tokens**2 - (self.mixed_tokens - self.rows) ** 2) / 2
        more = mixed - (prompt - chunk_attention) - cost.decode_context * self.rows * self.context
        alone_row = max((alone - seconds_of_few) / (self.rows - few) - cost.decode_context, 0.0)
        return replace(
            cost,
            decode_row=cost.prefill_token + max(more / self.rows, 0.0),
            alone_row=alone_row,
            alone_fixed=max(seconds_of_few - few * (alone_row + cost.decode_context), 0.0),
        )

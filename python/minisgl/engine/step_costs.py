"""Coefficients of a step's cost model: measured on a GPU, estimated for a CPU, whose first steps correct them.

Batches of the measurement have a prompt or some decodes of random text, whose K and V lie in pages of the real pool.
All ranks of a group run the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minisgl.attention.base import AttentionSpec
from minisgl.core import Batch, Int32Array, NewRow, SamplingParams
from minisgl.step_cost import StepCost

SMALL_CHUNK, LARGE_CHUNK = 256, 2048  # tokens between which a prompt's seconds are a line
LONG_CONTEXT = 8192  # tokens before a chunk
DECODES, DECODE_CONTEXT = 32, 2048  # rows, tokens before each
RUNS = 3  # of each step; the fastest counts

CPU_BYTES = 12e9  # bytes a second that a CPU reads
CPU_OPERATIONS = 2e11  # operations a second of a CPU's matrix products
CPU_ATTENTION = 2e10  # operations a second of a CPU's attention

NOTHING = 1e-9  # the fewest seconds of a token of a prompt, so that budgets stay finite


def estimate(weight_bytes: int, weights_per_token: int, specs: Sequence[AttentionSpec]) -> StepCost:
    """Return what a CPU may take: the weights read once, `weights_per_token` products for each token, attention."""
    token = 2 * weights_per_token / CPU_OPERATIONS
    context = sum(4 * spec.num_heads * spec.head_dim for spec in specs) / CPU_ATTENTION
    return StepCost(
        prefill_token=token,
        prefill_context=context,
        decode_row=token,
        decode_context=context,
        fixed=weight_bytes / CPU_BYTES,
    )


def measure(
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

    `seconds_of` returns the device's seconds for steps that are launched one behind the other. `num_window_pages`: of a
    windowed group, if there is one.
    """
    pools = (num_pages,) if num_window_pages is None else (num_pages, num_window_pages)

    random = np.random.default_rng(0)

    def plan(rows: int, start_pos: int, query_len: int) -> Batch:
        token_ids = random.integers(vocab_size, size=(rows, start_pos + query_len), dtype=np.int32)
        return _batch(token_ids, start_pos, pools, page_size)

    large = min(LARGE_CHUNK, max_prefill_tokens, max_seq_len - 1)
    small = min(SMALL_CHUNK, large // 2)
    behind = min(LONG_CONTEXT, max_seq_len - 1 - small)
    rows, context = min(DECODES, num_slots), min(DECODE_CONTEXT, max_seq_len - 2)
    if small < 2 or behind < 1 or context < 2:
        return None
    # Short steps are launched behind a long prompt, so that the device never waits for the host, which may need longer
    # to launch a step than the device to run it.
    series = (
        (plan(1, 0, large), plan(1, 0, small), plan(rows, 1, 1)),
        (plan(1, 0, large), plan(1, behind, small), plan(rows, context, 1)),
    )
    # The runs of a kind are spread over rounds, so that a short disturbance does not affect all of them.
    rounds = [[seconds for batches in series for seconds in seconds_of(batches)] for _ in range(RUNS)]
    first, short_prompt, decodes, second, later_chunk, long_decodes = map(min, zip(*rounds, strict=True))
    attended = max((later_chunk - short_prompt) / (small * behind), 0.0)
    # Seconds of two lengths of prompts, less their attention: two points of a line.
    short, long = short_prompt - attended * small**2 / 2, min(first, second) - attended * large**2 / 2
    token = max((long - short) / (large - small), NOTHING)
    fixed = max(short - token * small, 0.0)
    if fixed > decodes:  # decodes have the fixed part, too, so the short prompt must have waited for the host
        fixed, token = decodes, max((long - decodes) / large, NOTHING)
    return StepCost(
        prefill_token=token,
        prefill_context=attended,
        decode_row=token,  # a decode beside a chunk, for which the weights are read anyway
        decode_context=max((long_decodes - decodes) / (rows * (context - 1)), 0.0),
        fixed=fixed,
    )


def _batch(token_ids: Int32Array, start_pos: int, pools: Sequence[int], page_size: int) -> Batch:
    """Return a step of all tokens [rows, n] from `start_pos` on, for rows that enter with it.

    As far as the pools, of so many pages each, reach, none of them shares a page. They enter, for captured decodes read
    lengths and tokens of the device's own.
    """
    rows, known = token_ids.shape
    pages = -(-known // page_size)
    numbers = np.arange(rows * pages, dtype=np.int32)
    slots, indices = np.divmod(numbers, pages)
    none = np.zeros(0, dtype=np.int32)
    return Batch(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        start_pos=np.full(rows, start_pos, dtype=np.int32),
        query_lens=np.full(rows, known - start_pos, dtype=np.int32),
        needs_sample=np.ones(rows, dtype=np.bool_),
        new_pages=np.stack([slots, indices, *(numbers % num_pages for num_pages in pools)], axis=1),
        new_rows=[NewRow(slot, ids, none, SamplingParams(), 0, known) for slot, ids in enumerate(token_ids)],
    )

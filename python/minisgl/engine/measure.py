"""What a running engine takes on its GPU besides weights and KV pool, found by trying it before the pool is made.

The trial has the slots of the real engine and a pool of one page, in which all rows read and write: what is computed is
of no use, but its memory is the real one.
"""

from __future__ import annotations

import gc

import numpy as np
import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.core import Batch, SamplingFlags, ScoredTokens, StepResult
from minisgl.engine.forward import StepRunner
from minisgl.engine.graphs import Graphs, GraphSizes
from minisgl.engine.memory import GIB
from minisgl.limits import MAX_LOGPROBS

# Processed logits are a float32 copy.
_MOST_WORK = SamplingFlags.SAMPLED | SamplingFlags.FILTERED | SamplingFlags.PROCESSED


def largest_step(num_slots: int, max_seq_len: int, max_tokens: int) -> Batch:
    """A prefill of `max_tokens` in which every slot has a part, the first ones the longest, and all sample.

    Every slot has a token in any case: decodes are not bounded by the tokens of a prefill.
    """
    rows = num_slots
    query_lens = np.ones(rows, dtype=np.int32)
    left = max(max_tokens - rows, 0)
    for row in range(rows):
        query_lens[row] += min(left, max_seq_len - 1)
        left -= query_lens[row] - 1
    return Batch(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        start_pos=np.zeros(rows, dtype=np.int32),
        query_lens=query_lens,
        needs_sample=np.ones(rows, dtype=np.bool_),
        new_pages=np.zeros((0, 3), dtype=np.int32),
        flags=_MOST_WORK,
    )


def longest_step(num_slots: int, max_seq_len: int, max_tokens: int) -> Batch:
    """Return a prefill whose first row has all tokens but one for each other slot, behind as long a prefix as fits.

    All log-probabilities that a step can return are wanted: of the sampled tokens and of every token of the prompts.
    """
    rows = num_slots
    query_lens, start_pos = np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
    last = max(max_seq_len - 1, 1)  # the token behind the last position is read, to be scored
    query_lens[0] = min(max(max_tokens - rows + 1, 1), last)
    start_pos[0] = last - query_lens[0]
    return Batch(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        start_pos=start_pos,
        query_lens=query_lens,
        needs_sample=np.ones(rows, dtype=np.bool_),
        new_pages=np.zeros((0, 3), dtype=np.int32),
        flags=_MOST_WORK,
        logprobs=ScoredTokens(np.arange(rows, dtype=np.int32), MAX_LOGPROBS, query_lens, MAX_LOGPROBS),
    )


def run_trial(runner: StepRunner, batch: Batch) -> StepResult[Tensor]:
    """Launch all that a step can consist of."""
    return runner.sample(batch, runner.forward(batch), processed_logprobs=True)


def steps_bytes(runner: StepRunner, before: int, max_seq_len: int, max_tokens: int) -> int:
    """Return what the largest steps add to the `before` bytes that torch had. ConfigError if one does not fit."""
    device = runner.state.device
    runner.state.tokens.random_(0, runner.model.config.vocab_size)
    sizes = runner.state.scratch_slot, max_seq_len, max_tokens
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for batch in (largest_step(*sizes), longest_step(*sizes)):
            run_trial(runner, batch)
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        total = torch.cuda.get_device_properties(device).total_memory
        raise ConfigError(
            f"a prefill of {batch.num_tokens} tokens does not fit beside the weights, which take "
            f"{before / GIB:.2f} of {total / GIB:.2f} GiB: use a smaller --max-prefill-length "
            f"(such as {max(batch.num_tokens // 4, 1)}) or more ranks (--tp)"
        ) from error
    return torch.cuda.max_memory_reserved(device) - before


def graphs_bytes(runner: StepRunner, sizes: GraphSizes, max_seq_len: int) -> int:
    """What the graphs of all these sizes take, from captures of the two largest and of the smallest of each kind.

    The largest brings the memory that all share; the others, what grows with their rows.
    """
    device = runner.state.device
    trial = GraphSizes(_ends(sizes.decode), _ends(sizes.prefill))
    free = [_free(device)]
    taken: list[int] = []  # in the order of capture

    def captured() -> None:
        torch.cuda.synchronize(device)
        free.append(_free(device))
        taken.append(max(free[-2] - free[-1], 0))

    try:
        graphs = Graphs(runner, trial, max_seq_len, captured)
    except torch.OutOfMemoryError as error:
        if len(taken) < len(trial.prefill):
            raise ConfigError(
                f"CUDA graphs of prefills of up to {sizes.prefill[-1]} tokens do not fit: use a smaller "
                "--max-prefill-length, or --cuda-graph-max-bs 0, for none"
            ) from error
        raise ConfigError(
            f"CUDA graphs of up to {sizes.decode[-1]} rows do not fit: use a smaller --cuda-graph-max-bs "
            f"(such as {sizes.decode[-1] // 4}; 0: none)"
        ) from error
    del graphs
    gc.collect()
    torch.cuda.empty_cache()
    prefill, decode = taken[: len(trial.prefill)][::-1], taken[len(trial.prefill) :][::-1]
    return _of_all(sizes.prefill, trial.prefill, prefill) + _of_all(sizes.decode, trial.decode, decode)


def _ends(sizes: list[int]) -> list[int]:
    """The smallest and the two largest."""
    return sorted({*sizes[:1], *sizes[-2:]})


def _of_all(sizes: list[int], trial: list[int], taken: list[int]) -> int:
    """What all sizes take, from what those of the trial took."""
    if len(sizes) <= 1:
        return sum(taken)
    return taken[-1] + int(sum(np.interp(sizes[:-1], trial[:-1], taken[:-1])))


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]

"""Trial of steps on a GPU: the memory that they and their graphs take besides weights and KV pool, and their launches.

The trial has all slots of the real engine and a pool of one page, which all rows read and write: the results are
meaningless, but memory and launches are those of real steps.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.core import Batch, Int32Array, ScoredTokens, StepResult
from minisgl.engine.cuda_graphs.graphs import Graphs
from minisgl.engine.cuda_graphs.launch_trial import launch_seconds, launched_tokens
from minisgl.engine.cuda_graphs.sizes import PREFILL_SIZES, GraphSizes
from minisgl.engine.device import GIB
from minisgl.engine.forward import StepRunner
from minisgl.engine.memory import Needs
from minisgl.engine.parts import EngineStart, RunnerParts
from minisgl.limits import MAX_LOGPROBS
from minisgl.sampling_params import SamplingFlags

_SHORT_PROMPT = 256  # tokens


class StepTrial(NamedTuple):
    """Findings of a trial of steps."""

    needs: Needs = Needs()
    sizes: GraphSizes | None = None  # those of the possible graphs that pay
    launching: float = 0.0  # as in StepCost


def largest_step(num_slots: int, max_seq_len: int, max_tokens: int) -> Batch:
    """Return a step of all slots with `max_tokens` prefill tokens, as many as possible in the first rows.

    Every slot has at least one token, because decodes do not count against the bound on prefill tokens.
    """
    query_lens = np.ones(num_slots, dtype=np.int32)
    left = max(max_tokens - num_slots, 0)
    for row in range(num_slots):
        query_lens[row] += min(left, max_seq_len - 1)
        left -= query_lens[row] - 1
    return _trial_step(np.zeros(num_slots, dtype=np.int32), query_lens)


def longest_step(num_slots: int, max_seq_len: int, max_tokens: int) -> Batch:
    """Return a step whose first row has all tokens except one for each other slot, after the longest possible prefix.

    It returns all log-probabilities that a step can: of the sampled tokens and of every token of the prompts.
    """
    query_lens, start_pos = np.ones(num_slots, dtype=np.int32), np.zeros(num_slots, dtype=np.int32)
    last = max(max_seq_len - 1, 1)  # the token after the last position is read, because it is scored
    query_lens[0] = min(max(max_tokens - num_slots + 1, 1), last)
    start_pos[0] = last - query_lens[0]
    scored = ScoredTokens(np.arange(num_slots, dtype=np.int32), MAX_LOGPROBS, query_lens, MAX_LOGPROBS)
    return _trial_step(start_pos, query_lens, scored)


def _trial_step(start_pos: Int32Array, query_lens: Int32Array, logprobs: ScoredTokens | None = None) -> Batch:
    """Return a step of all slots whose sampling takes the most memory: processed logits are a float32 copy."""
    return Batch(
        step=0,
        slots=np.arange(len(query_lens), dtype=np.int32),
        start_pos=start_pos,
        query_lens=query_lens,
        needs_sample=np.ones(len(query_lens), dtype=np.bool_),
        new_pages=np.zeros((0, 3), dtype=np.int32),
        flags=SamplingFlags.SAMPLED | SamplingFlags.FILTERED | SamplingFlags.PROCESSED,
        logprobs=logprobs,
    )


def run_trial(runner: StepRunner, batch: Batch) -> StepResult[Tensor]:
    """Run a step's forward and sampling with processed log-probabilities, which take the most memory."""
    return runner.sample(batch, runner.forward(batch), processed_logprobs=True)


def try_steps(parts: RunnerParts, sizes: GraphSizes | None) -> StepTrial:
    """Try the largest steps, their launches, and graphs of the possible sizes."""
    start = parts.start
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(start.device)
    runner = parts.runner(0, 0, start.context_len)
    # The trial's recurrent states have their real size, which the budget of the pool counts.
    states = parts.attention.kv_layout.state_bytes(parts.num_slots, parts.num_snapshots)
    steps = steps_bytes(runner, before, start.max_prefill_tokens) - states
    sizes, launching = _try_launches(runner, start, sizes)
    torch.cuda.empty_cache()
    graphs = 0 if sizes is None else graphs_bytes(runner, sizes)
    del runner
    torch.cuda.empty_cache()  # memory that torch keeps for reuse would count as used
    return StepTrial(Needs(steps, graphs), sizes, launching)


def _try_launches(runner: StepRunner, start: EngineStart, sizes: GraphSizes | None) -> tuple[GraphSizes | None, float]:
    """Return the sizes of those graphs that pay, and `StepCost.launching`, which is 0 if prefills have graphs.

    The largest figure of all ranks counts: a late rank delays the others.
    """

    def prompt(most: int) -> Batch:
        tokens = max(min(most, start.max_prefill_tokens, start.context_len - 1), 1)
        return _trial_step(np.zeros(1, dtype=np.int32), np.array([tokens], dtype=np.int32))

    if sizes is not None and sizes.prefill:
        tokens = launched_tokens(runner, prompt(PREFILL_SIZES[-1]))
        return sizes.for_prefills(start.tp.largest(tokens)), 0.0
    seconds = launch_seconds(runner, prompt(_SHORT_PROMPT))
    return sizes, start.tp.largest(int(1e6 * seconds)) / 1e6


def steps_bytes(runner: StepRunner, before: int, max_tokens: int) -> int:
    """Return the bytes that the largest steps add to torch's `before` bytes. ConfigError if one does not fit."""
    device = runner.state.device
    runner.state.tokens.random_(0, runner.model.config.vocab_size)
    sizes = runner.state.scratch_slot, runner.state.max_seq_len, max_tokens
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


def graphs_bytes(runner: StepRunner, sizes: GraphSizes) -> int:
    """Return the bytes of the graphs of all these sizes, extrapolated from three graphs of each kind.

    These are the smallest and the two largest. The largest allocates the memory that all share; the others show how the
    rest grows with the size.
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
        graphs = Graphs(runner, trial, captured)
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
    """Return the smallest and the two largest of ascending sizes."""
    return sorted({*sizes[:1], *sizes[-2:]})


def _of_all(sizes: list[int], trial: list[int], taken: list[int]) -> int:
    """Return the bytes of all sizes, interpolated from those of the trial."""
    if len(sizes) <= 1:
        return sum(taken)
    return taken[-1] + int(sum(np.interp(sizes[:-1], trial[:-1], taken[:-1])))


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]

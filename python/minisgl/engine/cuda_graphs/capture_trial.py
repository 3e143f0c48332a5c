"""Trial of CUDA graphs for a model whose modules are not ours: can a step be captured, and is its replay right?

A module may read a result back to the host and branch on it, or keep host state that changes from step to step. Torch
reports the former; the latter shows if a step other than the captured one is replayed.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Batch, pages_for
from minisgl.engine.cuda_graphs.graphs import DecodeGraphs, GraphMemory, PrefillGraphs
from minisgl.engine.cuda_graphs.sizes import GraphSizes
from minisgl.engine.forward import StepRunner
from minisgl.engine.parts import RunnerParts
from minisgl.engine.step_inputs import step_inputs, upload_inputs
from minisgl.error_text import in_one_line
from minisgl.sampling_params import SamplingFlags

logger = logging.getLogger(__name__)

_ROWS = 2  # rows of a trial's steps
_PROMPT_LEN = 5
# Least cosine of the angle between logits: attention may add in another order, which may route a token differently.
_ALIKE = 0.9


def sizes_that_pass(parts: RunnerParts, sizes: GraphSizes) -> GraphSizes | None:
    """Return the sizes that pass the trial, the same on all ranks; None if not even decodes do."""
    layout, context_len = parts.attention.kv_layout, parts.start.context_len
    pages = _ROWS * pages_for(_PROMPT_LEN + 1, layout.page_size)
    runner = dataclasses.replace(parts, num_slots=_ROWS).runner(
        pages, 0 if layout.window is None else pages, context_len
    )

    def fits(fault: str | None, what: str) -> bool:
        if fault is not None:
            logger.warning("%s run without CUDA graphs: %s", what, fault)
        return parts.start.tp.smallest(int(fault is None)) == 1

    if not fits(_decode_fault(runner), "steps"):
        return None
    if sizes.prefill and not fits(_prefill_fault(runner, sizes.prefill[0]), "prefills"):
        return GraphSizes(sizes.decode, [])
    return sizes


def _decode_fault(runner: StepRunner) -> str | None:
    """Return why a decode cannot be captured, or None. The runner has _ROWS slots and their pages."""
    prefill, decode = _steps(runner)
    runner.forward(prefill)  # the decode reads its keys and values
    state, config = runner.state, runner.model.config
    slots = torch.arange(_ROWS, device=state.device)
    logits = torch.empty((_ROWS, config.vocab_size), dtype=runner.model.dtype, device=state.device)
    attention = runner.attention.capture_decode(_ROWS)
    kv_lens = np.full(_ROWS, state.max_seq_len, dtype=np.int32)

    def launch() -> Tensor:
        runner.model(runner.decode_context(slots, kv_lens, attention, logits))
        return logits

    def replay() -> Tensor:
        return DecodeGraphs(runner, [_ROWS], GraphMemory()).forward(decode).logits

    launch()
    attention.prepare(decode.start_pos)
    return _fault(launch, replay)


def _prefill_fault(runner: StepRunner, tokens: int) -> str | None:
    """Return why a prefill cannot be captured in a graph of `tokens` tokens, or None."""
    prefill, _ = _steps(runner)
    host = step_inputs(prefill)
    inputs = upload_inputs(host, runner.state.device)
    ctx = runner.context(inputs, prefill.query_lens, host.kv_lens, logits_indices=inputs.logits_indices.long())

    def launch() -> Tensor:
        logits: Tensor = runner.model(ctx)
        return logits

    def replay() -> Tensor:
        return PrefillGraphs(runner, [tokens], GraphMemory()).forward(prefill).logits

    return _fault(launch, replay)


def _steps(runner: StepRunner) -> tuple[Batch, Batch]:
    """Return a prefill of random prompts, and the decode that follows it."""
    state, slots = runner.state, np.arange(_ROWS, dtype=np.int32)
    pages = pages_for(_PROMPT_LEN + 1, state.page_size)
    taken = torch.arange(_ROWS * pages, dtype=torch.int32, device=state.device)
    for table in (state.page_table, state.window_table):
        if table is not None:
            table[:_ROWS, :pages] = taken.view(_ROWS, pages)
    state.tokens[:_ROWS].random_(0, runner.model.config.vocab_size)
    state.lengths[:_ROWS] = _PROMPT_LEN + 1

    def step(start: int, length: int) -> Batch:
        return Batch(
            step=0,
            slots=slots,
            start_pos=np.full(_ROWS, start, dtype=np.int32),
            query_lens=np.full(_ROWS, length, dtype=np.int32),
            needs_sample=np.ones(_ROWS, dtype=np.bool_),
            new_pages=np.zeros((0, 3), dtype=np.int32),
            flags=SamplingFlags(0),
        )

    return step(0, _PROMPT_LEN), step(_PROMPT_LEN, 1)


def _fault(launch: Callable[[], Tensor], replay: Callable[[], Tensor]) -> str | None:
    """Return what is wrong with the replay of a step, or None."""
    launch()
    launched = launch().float().clone()
    torch.cuda.synchronize()
    try:
        # This finds a synchronization before a capture fails, which would leave torch in the middle of a capture.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        replayed = replay().float()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # raised by torch, called by any module of transformers
        return f"a module synchronizes with the host: {in_one_line(error)[:200]}"
    cosine = float(torch.cosine_similarity(replayed.flatten(), launched.flatten(), dim=0))
    return None if cosine >= _ALIKE else f"a replay computes something else (cosine of the logits {cosine:.2f})"

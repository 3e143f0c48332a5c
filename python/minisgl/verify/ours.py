"""Answers of our engine: all prompts together, through the scheduler, twice, so that batches, chunks, pages and
cache hits are in them. Every step's logits are compared as they come and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.config import ConfigError, EngineConfig, SchedulerConfig
from minisgl.context import ForwardContext
from minisgl.core import Batch
from minisgl.distributed import SingleRank
from minisgl.engine.cuda_graphs.graphs import DecodeGraphs
from minisgl.engine.engine import Engine
from minisgl.engine.forward import ForwardOutput
from minisgl.engine.step_inputs import step_inputs
from minisgl.layers.norm import RMSNorm
from minisgl.message.packed_ids import unpack_ids
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.decoder import DecoderModel
from minisgl.models.decoder_layer import States
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.assembly import make_loop, reuses_prefixes
from minisgl.verify.compare import Run, common_length, compare_rows
from minisgl.verify.oracle import TRACED, Answers, Expected, Float32Array

# Called on the engine's device with each step's plan, the tokens of each row so far, and all logits [T, vocab].
Observer = Callable[[Batch, Sequence[list[int]], Tensor], None]
LayerInputs: TypeAlias = tuple[States, ForwardContext, RMSNorm | None]
"""Arguments of DecoderLayer.forward."""


class ObservedEngine(Engine):
    """An engine that shows the logits of every token. It bypasses CUDA graphs, which keep only logits that sample."""

    observer: Observer | None = None

    def _graphs_for(self, batch: Batch) -> DecodeGraphs | None:
        return super()._graphs_for(batch) if self.observer is None else None

    def _forward(self, batch: Batch) -> ForwardOutput:
        if self.observer is None:
            return super()._forward(batch)
        runner = self._runner
        runner.apply(batch)
        model = self._decoder_model
        logits: list[Tensor] = []

        def keep(_last_layer: nn.Module, inputs: LayerInputs, states: States) -> None:
            logits.append(model.logits(states.x, inputs[1]))

        with model.model.layers[-1].register_forward_hook(keep):
            output = runner.forward(batch)
        ends = (batch.start_pos + batch.query_lens).tolist()
        known = [runner.state.tokens[slot, :end].tolist() for slot, end in zip(batch.slots.tolist(), ends, strict=True)]
        # A product of fewer rows rounds differently, so the sampler's own logits replace those of the same tokens here.
        sampling = step_inputs(batch).logits_indices
        logits[0][torch.from_numpy(sampling).to(logits[0].device).long()] = output.logits
        self.observer(batch, known, logits[0])
        return output

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    @property
    def layers(self) -> list[nn.Module]:
        """Return the decoder layers, from hidden states to hidden states."""
        return list(self._decoder_model.model.layers)

    @property
    def _decoder_model(self) -> DecoderModel:
        model = self._runner.model
        if not isinstance(model, DecoderModel):
            raise ConfigError("the model is transformers' own: there is nothing to compare it with")
        return model


@dataclass(slots=True)
class OurAnswers:
    """One Run per prompt and pass, and the difference of hidden states after each layer."""

    passes: dict[str, list[Run]] = field(default_factory=dict)
    layers: list[float] = field(default_factory=list)  # relative root mean square; 0 is the embedding


def run_engine(
    config: EngineConfig,
    scheduling: SchedulerConfig,
    model: ModelConfig,
    answers: Answers,
    *,
    progress: Callable[[], object],
) -> OurAnswers:
    """Run our engine over the same prompts. ConfigError if the model cannot be loaded with this configuration."""
    engine = ObservedEngine(
        config,
        model,
        tp=SingleRank(),
        phase=lambda _text: nullcontext(),
        progress=False,
        max_prefill_tokens=scheduling.max_prefill_tokens,
        reuses_prefixes=reuses_prefixes(scheduling, model),
    )
    try:
        passes = _Passes(engine, scheduling, model, answers)
        found = OurAnswers()
        found.passes["first"] = passes.run(observe=True)
        progress()
        found.passes["again"] = passes.run(observe=True)
        progress()
        if engine.has_graphs:
            found.passes["graphs"] = passes.run(observe=False)
            progress()
        found.layers = _compare_layers(engine, scheduling, model, answers)
        progress()
        return found
    finally:
        engine.close()


class _Passes:
    """Runs all prompts through one scheduler; its cache stays between the passes."""

    def __init__(
        self, engine: ObservedEngine, scheduling: SchedulerConfig, model: ModelConfig, answers: Answers
    ) -> None:
        self._engine = engine
        self._loop = make_loop(scheduling, engine, model)
        self._expected = answers.expected
        self._begun = 0

    def run(self, *, observe: bool) -> list[Run]:
        runs = [Run() for _ in self._expected]
        first = self._begun
        self._begun += len(runs)
        self._engine.observer = _comparing(self._expected, runs) if observe else None
        for index, expected in enumerate(self._expected):
            ids = np.array(expected.prompt.tokens, dtype=np.int32)
            params = SamplingParams(max_tokens=len(expected.new_tokens), ignore_eos=True)
            # Decoding is greedy, so the seed can hold the prompt's number.
            self._loop.scheduler.add(first + index, ids, params, seed=index)
        while self._loop.has_work:
            output = self._loop.step()
            for opened in output.opened:
                runs[opened.seq_id - first].cached_tokens = opened.cached_tokens
            for seq_id, token in zip(output.seq_ids, unpack_ids(output.tokens).tolist(), strict=True):
                runs[seq_id - first].tokens.append(token)
        self._engine.observer = None
        return runs


def _comparing(expected: Sequence[Expected], runs: Sequence[Run]) -> Observer:
    """Return an observer that compares positions up to the first token that differs from the oracle's."""
    prompt_of: dict[int, int] = {}  # by slot

    def observe(batch: Batch, known: Sequence[list[int]], logits: Tensor) -> None:
        prompt_of.update({row.slot: row.seed for row in batch.new_rows})
        host: Float32Array = logits.float().cpu().numpy()
        at = 0
        for slot, start, length, tokens in zip(
            batch.slots.tolist(), batch.start_pos.tolist(), batch.query_lens.tolist(), known, strict=True
        ):
            theirs, run = expected[prompt_of[slot]], runs[prompt_of[slot]]
            same = min(common_length(tokens, theirs.tokens), start + length, len(theirs.logits))
            if same > start:
                compared = compare_rows(start, host[at : at + same - start], theirs.logits[start:same])
                run.positions.update({position.position: position for position in compared})
            at += length

    return observe


def _compare_layers(
    engine: ObservedEngine, scheduling: SchedulerConfig, model: ModelConfig, answers: Answers
) -> list[float]:
    """Return the relative difference of hidden states after each layer, over the traced prompt's last tokens."""
    prompt = answers.expected[answers.traced].prompt.tokens
    hidden: list[list[Tensor]] = [[] for _ in answers.hidden]
    fresh = SchedulerConfig(cache="naive", max_prefill_tokens=scheduling.max_prefill_tokens, overlap=False)
    loop = make_loop(fresh, engine, model)
    loop.scheduler.add(0, np.array(prompt, dtype=np.int32), SamplingParams(max_tokens=1, ignore_eos=True), seed=0)
    engine.observer = _ignore  # a graph would not call the hooks
    with _tapped(engine.layers[: len(hidden)], hidden):
        while loop.has_work:
            loop.step()
    engine.observer = None
    differences = []
    for ours, theirs in zip(hidden, answers.hidden, strict=True):
        mine = torch.cat(ours)[-TRACED:].float().cpu().numpy()
        size = max(float(np.linalg.norm(theirs)), 1e-30)
        differences.append(float(np.linalg.norm(mine - theirs)) / size)
    return differences


def _ignore(_batch: Batch, _known: Sequence[list[int]], _logits: Tensor) -> None:
    pass


@contextmanager
def _tapped(layers: Sequence[nn.Module], into: Sequence[list[Tensor]]) -> Iterator[None]:
    """Record the input of each layer, which is the output of the layer before it."""

    def tap(kept: list[Tensor]) -> Callable[[nn.Module, LayerInputs], None]:
        def keep(_layer: nn.Module, inputs: LayerInputs) -> None:
            kept.append(inputs[0].x.clone())

        return keep

    hooks = [layer.register_forward_pre_hook(tap(kept)) for layer, kept in zip(layers, into, strict=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

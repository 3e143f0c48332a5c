"""The engine of one rank: everything that lives on its device, and the two launches that run a plan there."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.attention.backend_choice import make_attention
from minisgl.attention.base import AttentionSpec
from minisgl.config import ConfigError, EngineConfig
from minisgl.core import AnyArray, Batch, Int32Array, PendingStep, StepResult, pages_for
from minisgl.distributed import TPGroup
from minisgl.engine.device import bound_primitive_caches, resolve_device, resolve_dtype
from minisgl.engine.forward import ForwardOutput
from minisgl.engine.graph_sizes import graph_sizes
from minisgl.engine.graph_trial import sizes_that_hold
from minisgl.engine.graphs import (
    DecodeGraphs,
    Graphs,
    samples_from_graph,
)
from minisgl.engine.memory import (
    CPU_SEQUENCES,
    Needs,
    describe_states,
    measure_needs,
    pool_pages,
    room_for_pool,
    slots_with_states,
    snapshots_with_room,
)
from minisgl.engine.parts import RunnerParts, divide_logits, layer_specs, load_weights, make_sampler
from minisgl.engine.queue import make_queue
from minisgl.engine.step_costs import estimate, measure
from minisgl.kernel.availability import make_ops
from minisgl.kvcache.window import WindowGroup, leaves_pages_behind, usual_ratio, windowed_pages
from minisgl.layers.linear import bind_weights, product_labels
from minisgl.layers.mlp import expert_labels
from minisgl.limits import Limits
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.loading import build_model
from minisgl.progress import progress_bar
from minisgl.step_cost import StepCost

if TYPE_CHECKING:  # needs CUDA's packages
    pass

logger = logging.getLogger(__name__)

Phase = Callable[[str], AbstractContextManager[None]]


class Engine:
    """Model, KV pool and slot state on one device. Several may live in one process."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        tp: TPGroup,
        phase: Phase,
        progress: bool,
        max_prefill_tokens: int,
        reuses_prefixes: bool = True,
    ) -> None:
        """`reuses_prefixes`: snapshots of recurrent states are of use, if the model has any."""
        self.device = resolve_device(config, tp.rank)
        self.dtype = resolve_dtype(config, model.dtype)
        self.page_size = config.page_size
        self.num_slots = config.max_running_requests
        self.num_snapshots = 0
        self.step_cost: StepCost | None = None
        self.window: WindowGroup | None = None  # layers that have pages of their own
        self._kv_format = "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}"
        self._processed_logprobs = config.logprobs_mode == "processed_logprobs"
        self._tp = tp
        context_len = _context_len(config, model)
        specs = layer_specs(config, model, tp, self.dtype)
        attending = [spec for spec in specs if isinstance(spec, AttentionSpec)]
        quantized = config.quantization != "auto" or model.quantization is not None
        if self.device.type == "cpu":
            bound_primitive_caches()
        with phase("load kernels"):  # first: threads go on compiling them while weights are loaded
            self._queue = make_queue(self.device, self.num_slots)
            ops = make_ops(self.device)
            sampler = make_sampler(self.device, self.dtype)
            if self.device.type == "cuda":
                on_paper = build_model(model, tp=tp, dtype=self.dtype, device=torch.device("meta"))
                kernels = on_paper.kernel_needs(attending[0].kv_dtype)
                if quantized:  # in which format experts are kept is known when they have been loaded
                    kernels = dataclasses.replace(kernels, experts=frozenset())
                ops.begin_compiling(kernels)
            windows = [spec.window for spec in attending if spec.window is not None]
            grouped = leaves_pages_behind(windows, self.page_size, context_len)
            if self.device.type != "cpu" and config.window_ratio is None:  # until a GPU has run it
                grouped = False
            attention = self._queue.call(
                lambda: make_attention(config.attention, specs, self.device, window_group=grouped)
            )
            attention.begin_compiling(self.num_slots)
        with phase("load weights"):
            weights = self._queue.call(
                lambda: load_weights(config, model, tp, self.dtype, self.device, ops, progress=progress)
            )
            self._queue.call(lambda: bind_weights(weights, ops))
            if quantized and self.device.type == "cuda":
                ops.begin_compiling(weights.kernel_needs(attending[0].kv_dtype))
        if quantized and tp.rank == 0:
            logger.info("products read %s", ", ".join([product_labels(weights), *expert_labels(weights)]))
        layout = attention.kv_layout
        if layout.has_states:
            for_states = tp.smallest(room_for_pool(self.device, config.memory_ratio, tp.size, Needs()).pool)
            self.num_slots = slots_with_states(self.num_slots, layout, for_states)
            if reuses_prefixes:
                self.num_snapshots = snapshots_with_room(config.state_snapshots, self.num_slots, layout, for_states)
            if tp.rank == 0:
                logger.info(describe_states(layout, self.num_slots, config.max_running_requests, self.num_snapshots))
        parts = RunnerParts(weights, self.num_slots, self.num_snapshots, attention, ops, sampler, self.device)
        sizes = graph_sizes(config, parts, max_prefill_tokens)
        if sizes is not None and weights.graphs_by_trial:
            with phase("try CUDA graphs"):
                sizes = self._queue.call(partial(sizes_that_hold, parts, sizes, context_len, tp))
        if sizes is not None and tp.size > 1 and weights.divides_logits:
            divided = self._queue.call(lambda: divide_logits(tp, sampler, sizes.decode[-1], model, self.dtype))
            parts = dataclasses.replace(parts, divided=divided)
        needs = Needs()
        if self.device.type == "cuda":
            with phase("measure a step's memory"):
                needs = self._queue.call(lambda: measure_needs(parts, sizes, context_len, max_prefill_tokens))
        with phase("allocate the KV cache"):

            def window_pages(num_pages: int) -> int:
                if layout.window is None:
                    return 0
                ratio = config.window_ratio or usual_ratio(layout.window, self.page_size, context_len)
                return windowed_pages(num_pages, ratio, layout.window, self.page_size, max_prefill_tokens)

            useful_sequences = self.num_slots if self.device.type == "cuda" else min(self.num_slots, CPU_SEQUENCES)
            room = room_for_pool(self.device, config.memory_ratio, tp.size, needs)
            state_bytes = layout.state_bytes(self.num_slots, self.num_snapshots)
            self.num_pages = pool_pages(
                config,
                pool_bytes=lambda pages: layout.pool_bytes(pages, window_pages(pages)),
                useful_pages=useful_sequences * pages_for(context_len, self.page_size),
                room=dataclasses.replace(room, pool=tp.smallest(room.pool) - state_bytes),
            )
            if layout.window is not None:
                self.window = WindowGroup(layout.window, window_pages(self.num_pages))
            # A sequence must fit into the pool alone.
            max_seq_len = min(context_len, self.num_pages * self.page_size)
            self.limits = Limits(max_seq_len=max_seq_len, vocab_size=model.vocab_size)
            # On the queue, like all that follows: another stream's fill would race with the first step's reads.
            self._runner = self._queue.call(
                lambda: parts.runner(self.num_pages, window_pages(self.num_pages), max_seq_len)
            )
        # For all steps: the host writes a step's only when it has the tokens of the step before, and by then the device
        # has read that one's.
        self._bitmask = torch.empty(
            (self.num_slots, -(-model.vocab_size // 32)), dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        self._forwarded: Callable[[], ForwardOutput] | None = None  # of the step whose sampling is not launched yet
        self._graphs: Graphs | None = None
        if sizes is not None:
            with phase("capture CUDA graphs"), progress_bar("CUDA graphs", len(sizes), shown=progress) as bar:
                self._graphs = self._queue.call(lambda: Graphs(self._runner, sizes, max_seq_len, bar.update))
        if self.device.type == "cuda":
            with phase("measure a step's time"):
                self.step_cost = measure(
                    self._run,
                    num_pages=self.num_pages,
                    page_size=self.page_size,
                    num_slots=self.num_slots,
                    vocab_size=model.vocab_size,
                    max_seq_len=max_seq_len,
                    max_prefill_tokens=max_prefill_tokens,
                    num_window_pages=None if self.window is None else self.window.num_pages,
                )
        else:
            weight_bytes = sum(weight.nbytes for weight in weights.parameters())
            self.step_cost = estimate(weight_bytes, weights.layer_weights * len(specs), attending)

    @property
    def bitmask(self) -> Int32Array:
        """Memory for a step's grammar bitmask, as in StepEngine; pinned on CUDA."""
        array: Int32Array = self._bitmask.numpy()
        return array

    def forward(self, batch: Batch) -> None:
        """Launch a step's forward behind what was launched before, and return at once."""
        self._forwarded = self._queue.launch(lambda: self._forward(batch))

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> PendingStep:
        """Launch the sampling of the step whose forward was launched last, and return at once.

        `bitmask`: the beginning of `self.bitmask`, a row for each that samples.
        """
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is None:
            raise RuntimeError("a step's sampling is launched once, behind its forward")
        words = None if bitmask is None else self._bitmask[: len(bitmask)]

        def sample() -> StepResult[Tensor]:
            on_device = None if words is None else words.to(self.device, non_blocking=True)
            return self._sample(batch, forwarded(), on_device)

        pending = self._queue.submit(sample)

        def result() -> StepResult[AnyArray]:
            step = pending()
            self._tp.check()  # before anybody sees tokens of sums that lack a rank's part
            return step

        return result

    def _run(self, batch: Batch) -> None:
        """Run a whole step."""
        self.forward(batch)
        self.sample(batch)()

    def _forward(self, batch: Batch) -> ForwardOutput:
        self._runner.apply(batch)
        graphs = self._graphs_for(batch)
        if graphs is not None:
            return graphs.forward(batch)
        prefill = None if self._graphs is None else self._graphs.prefill(batch)
        return self._runner.forward(batch) if prefill is None else prefill.forward(batch)

    def _sample(self, batch: Batch, forwarded: ForwardOutput, bitmask: Tensor | None) -> StepResult[Tensor]:
        graphs = self._graphs_for(batch)
        eager = graphs is None or bitmask is not None or not samples_from_graph(batch)
        return self._runner.sample(
            batch,
            forwarded,
            bitmask,
            replay=None if graphs is None or eager else partial(graphs.sample, batch),
            processed_logprobs=self._processed_logprobs,
        )

    def _graphs_for(self, batch: Batch) -> DecodeGraphs | None:
        return None if self._graphs is None else self._graphs.decode(batch)

    def describe(self) -> str:
        """Describe the engine in one line for the log."""
        windowed = "" if self.window is None else f" and {self.window.num_pages} of the layers with a window"
        return (
            f"{self.device}, {str(self.dtype).removeprefix('torch.')}, {self.num_pages} pages of {self.page_size} "
            f"tokens{self._kv_format}{windowed}, up to {self.num_slots} requests of {self.limits.max_seq_len} tokens"
        )

    def close(self) -> None:
        """Wait for the steps under way and give the device's memory back; the engine cannot be used afterwards."""
        self._queue.close()
        self._graphs = None
        del self._runner, self._bitmask
        gc.collect()  # modules and graphs refer to one another
        self._tp.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _context_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > longest:
        raise ConfigError(f"--max-seq-len-override {config.max_seq_len}: the model's positions end at {longest}")
    return config.max_seq_len or longest

"""The engine of one rank: owns everything on its device, and runs a plan there in two launches."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minisgl.config import ConfigError, EngineConfig
from minisgl.core import AnyArray, Batch, Int32Array, PendingStep, StepResult
from minisgl.distributed import TPGroup
from minisgl.engine.cost_measurement import estimate_cost, measure_cost
from minisgl.engine.cuda_graphs.capture_trial import sizes_that_pass
from minisgl.engine.cuda_graphs.graphs import DecodeGraphs, Graphs, samples_from_graph
from minisgl.engine.cuda_graphs.sizes import GraphSizes, graph_sizes
from minisgl.engine.device import resolve_device, resolve_dtype
from minisgl.engine.forward import ForwardOutput
from minisgl.engine.memory import CPU_SEQUENCES, Needs, memory_budget, pool_size
from minisgl.engine.parts import EngineStart, PhaseTimer, RunnerParts, load_parts, shard_logits
from minisgl.engine.step_trial import StepTrial, try_steps
from minisgl.kvcache.layout import KVLayout
from minisgl.kvcache.window import WindowGroup
from minisgl.limits import Limits
from minisgl.models.config.model_config import ModelConfig
from minisgl.progress import progress_bar
from minisgl.step_cost import StepCost


class Engine:
    """Model, KV pool and slot state on one device. A process may have several engines."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        tp: TPGroup,
        phase: PhaseTimer,
        progress: bool,
        max_prefill_tokens: int,
        reuses_prefixes: bool,
    ) -> None:
        """`phase`, `progress`, `max_prefill_tokens` and `reuses_prefixes` as in EngineStart."""
        self.device = resolve_device(config, tp.rank)
        self.dtype = resolve_dtype(config, model.dtype)
        self.page_size = config.page_size
        self._kv_format = "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}"
        self._processed_logprobs = config.logprobs_mode == "processed_logprobs"
        self._tp = tp
        start = EngineStart(
            config,
            model,
            tp,
            self.device,
            self.dtype,
            context_len=_context_len(config, model),
            max_prefill_tokens=max_prefill_tokens,
            reuses_prefixes=reuses_prefixes,
            phase=phase,
            progress=progress,
        )
        parts = load_parts(start)
        self._queue = parts.queue
        self.num_slots, self.num_snapshots = parts.num_slots, parts.num_snapshots
        sizes = self._graph_sizes(parts)
        parts = self._with_sharded_logits(parts, sizes)
        if parts.model.supports_sequence_parallel:
            enable = partial(tp.enable_sequence_parallel, max_prefill_tokens, model.hidden_size, self.dtype)
            self._queue.call(enable)
        trial = self._try_steps(parts, sizes)
        with phase("allocate the KV cache"):
            layout = parts.attention.kv_layout
            self.num_pages, num_window_pages = self._pool_size(start, layout, trial.needs)
            # Layers that have pages of their own.
            self.window = None if layout.window is None else WindowGroup(layout.window, num_window_pages)
            # The pool must be able to hold a sequence of this length.
            max_seq_len = min(start.context_len, self.num_pages * self.page_size)
            self.limits = Limits(max_seq_len=max_seq_len, vocab_size=model.vocab_size)
            # On the queue, as is all that follows: another stream's fill would race with the first step's reads.
            self._runner = self._queue.call(partial(parts.runner, self.num_pages, num_window_pages, max_seq_len))
        # One buffer serves all steps: the host writes a step's bitmask only when it has the tokens of the step before,
        # and by then the device has read the bitmask of that step.
        self._bitmask = torch.empty(
            (self.num_slots, -(-model.vocab_size // 32)), dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        # Output of the forward whose sampling has not been launched yet.
        self._output: Callable[[], ForwardOutput] | None = None
        self._graphs = self._capture_graphs(start, trial.sizes)
        try:
            self.step_cost: StepCost | None = self._step_cost(parts, trial.launching)
        except BaseException:
            if self._graphs is not None:
                self._graphs.close()  # as in `close`
            raise

    # --- parts of the start -----------------------------------------------------------------------------------

    def _graph_sizes(self, parts: RunnerParts) -> GraphSizes | None:
        """Return the sizes of possible CUDA graphs; for modules that are not ours, only those that pass a trial."""
        sizes = graph_sizes(parts)
        if sizes is None or not parts.model.graphs_by_trial:
            return sizes
        with parts.start.phase("try CUDA graphs"):
            return self._queue.call(partial(sizes_that_pass, parts, sizes))

    def _with_sharded_logits(self, parts: RunnerParts, sizes: GraphSizes | None) -> RunnerParts:
        """Return the parts with memory for sharded logits, if captured decodes can leave their logits sharded."""
        if sizes is None or self._tp.size == 1 or not parts.model.shards_logits:
            return parts
        sharded = self._queue.call(partial(shard_logits, parts, sizes.decode[-1]))
        return dataclasses.replace(parts, sharded_logits=sharded)

    def _try_steps(self, parts: RunnerParts, sizes: GraphSizes | None) -> StepTrial:
        """Return the findings of a trial of steps on a GPU; on a CPU nothing is measured or captured."""
        if self.device.type != "cuda":
            return StepTrial()
        with parts.start.phase("measure a step's memory"):
            return self._queue.call(partial(try_steps, parts, sizes))

    def _pool_size(self, start: EngineStart, layout: KVLayout, needs: Needs) -> tuple[int, int]:
        """Return the pages of the KV pool and of its windowed group, the same on all ranks."""
        budget = memory_budget(self.device, start.config.memory_ratio, self._tp.size, needs)
        for_pages = self._tp.smallest(budget.pool) - layout.state_bytes(self.num_slots, self.num_snapshots)
        return pool_size(
            start.config,
            layout,
            dataclasses.replace(budget, pool=for_pages),
            useful_sequences=self.num_slots if self.device.type == "cuda" else min(self.num_slots, CPU_SEQUENCES),
            context_len=start.context_len,
            max_prefill_tokens=start.max_prefill_tokens,
        )

    def _capture_graphs(self, start: EngineStart, sizes: GraphSizes | None) -> Graphs | None:
        if sizes is None:
            return None
        with start.phase("capture CUDA graphs"), progress_bar("CUDA graphs", len(sizes), shown=start.progress) as bar:
            return self._queue.call(lambda: Graphs(self._runner, sizes, bar.update))

    def _step_cost(self, parts: RunnerParts, launching: float) -> StepCost | None:
        """Return the cost of steps: measured on a GPU, estimated for a CPU."""
        if self.device.type != "cuda":
            weight_bytes = sum(weight.nbytes for weight in parts.model.parameters())
            weights_per_token = parts.model.layer_weights * len(parts.start.model.layers)
            return estimate_cost(weight_bytes, weights_per_token, [layer.spec for layer in parts.attention.layers])
        with parts.start.phase("measure a step's time"):
            cost = measure_cost(
                self._device_seconds,
                num_pages=self.num_pages,
                page_size=self.page_size,
                num_slots=self.num_slots,
                vocab_size=self.limits.vocab_size,
                max_seq_len=self.limits.max_seq_len,
                max_prefill_tokens=parts.start.max_prefill_tokens,
                num_window_pages=None if self.window is None else self.window.num_pages,
            )
        return None if cost is None else dataclasses.replace(cost, launching=launching)

    # --- steps ------------------------------------------------------------------------------------------------

    @property
    def bitmask(self) -> Int32Array:
        """Memory for a step's grammar bitmask, as in StepEngine; pinned on CUDA."""
        array: Int32Array = self._bitmask.numpy()
        return array

    def forward(self, batch: Batch) -> None:
        """Launch a step's forward after the earlier launches, and return at once."""
        self._queue.begin()
        self._output = self._queue.launch(lambda: self._forward(batch))

    def sample(self, batch: Batch, bitmask: Int32Array | None = None) -> PendingStep:
        """Launch the sampling of the step whose forward was launched last, and return at once.

        `bitmask`: the first rows of `self.bitmask`, one for each row of the batch that samples.
        """
        output, self._output = self._output, None
        if output is None:
            raise RuntimeError("a step's sampling must be launched once, after its forward")
        words = None if bitmask is None else self._bitmask[: len(bitmask)]

        def sample() -> StepResult[Tensor]:
            on_device = None if words is None else words.to(self.device, non_blocking=True)
            return self._sample(batch, output(), on_device)

        pending = self._queue.submit(sample)

        def result() -> StepResult[AnyArray]:
            step = pending()
            self._tp.check()  # raises if a rank failed, before tokens of an incomplete all-reduce are returned
            return step

        return result

    def _device_seconds(self, batches: Sequence[Batch]) -> list[float]:
        """Return the seconds of each step on a GPU; all steps are launched before the first is waited for."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]  # type: ignore[no-untyped-call]
        self._queue.launch(events[0].record)
        pending = []
        for batch, event in zip(batches, events[1:], strict=True):
            self.forward(batch)
            pending.append(self.sample(batch))
            self._queue.launch(event.record)
        for wait in pending:
            wait()
        events[-1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]

    def _forward(self, batch: Batch) -> ForwardOutput:
        self._runner.apply(batch)
        graphs = self._graphs_for(batch)
        if graphs is not None:
            return graphs.forward(batch)
        prefill = None if self._graphs is None else self._graphs.prefill(batch)
        return self._runner.forward(batch) if prefill is None else prefill.forward(batch)

    def _sample(self, batch: Batch, output: ForwardOutput, bitmask: Tensor | None) -> StepResult[Tensor]:
        graphs = self._graphs_for(batch)
        eager = graphs is None or bitmask is not None or not samples_from_graph(batch)
        return self._runner.sample(
            batch,
            output,
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
        """Wait for the steps in flight and free the device's memory; the engine cannot be used afterwards.

        The group of ranks stays, for its owner to close.
        """
        self._queue.close()
        if self._graphs is not None:
            # Leaving NCCL's group waits for graphs with its collectives. The traceback of an interrupted step may
            # refer to them, so that they would not be freed in time without this.
            self._graphs.close()
        self._graphs = self._output = None  # a call that failed may have left logits, which ranks can share
        del self._runner, self._bitmask
        gc.collect()  # modules and graphs refer to one another
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _context_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > longest:
        raise ConfigError(f"--max-seq-len-override {config.max_seq_len}: the model's positions end at {longest}")
    return config.max_seq_len or longest

"""Sizes of steps for which CUDA graphs are captured."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass

from minisgl.engine.parts import RunnerParts
from minisgl.models.pooling_model import PoolingModel

logger = logging.getLogger(__name__)

PREFILL_SIZES = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))  # tokens


def decode_graph_sizes(max_bs: int) -> list[int]:
    """Return 1, 2, 4, 8, then every 8 up to 256 and every 32 above: padding is below an eighth of a large batch."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_bs + 1, 32)]
    return sorted({size for size in sizes if size < max_bs} | {max_bs})


def prefill_graph_sizes(max_tokens: int) -> list[int]:
    """Return the token counts of graphs of prefills, up to the first that has room for `max_tokens`."""
    return list(PREFILL_SIZES[: bisect_left(PREFILL_SIZES, max_tokens) + 1])


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes to capture, both ascending."""

    decode: list[int]  # rows
    prefill: list[int]  # tokens; empty if prefills run without graphs

    def __len__(self) -> int:
        return len(self.decode) + len(self.prefill)

    def for_prefills(self, max_tokens: int) -> GraphSizes:
        """Return these sizes with only those of prefills of up to `max_tokens` tokens."""
        useful = prefill_graph_sizes(max_tokens)
        return GraphSizes(self.decode, [size for size in self.prefill if size in useful])


def graph_sizes(parts: RunnerParts) -> GraphSizes | None:
    """Return the sizes that can be captured; None if steps run without graphs."""
    config = parts.start.config
    if parts.start.device.type == "cpu":
        if config.cuda_graph_max_bs is not None:
            logger.info("--cuda-graph-max-bs is for GPUs and not used on the CPU")
        return None
    if isinstance(parts.model, PoolingModel):
        return None  # nothing is decoded
    max_bs = parts.num_slots
    if config.cuda_graph_max_bs is not None:
        max_bs = min(config.cuda_graph_max_bs, max_bs)
    if max_bs == 0:
        return None
    safe = {"attention": parts.attention.graph_safe, "experts": parts.model.graph_safe(parts.ops)}
    if not all(safe.values()):
        unsafe = " and ".join(name for name in safe if not safe[name])
        logger.warning("steps run without CUDA graphs: these cannot capture the %s", unsafe)
        return None
    prefill = []
    if parts.attention.prefill_graph_safe and parts.model.prefill_graph_safe(parts.ops):
        prefill = prefill_graph_sizes(parts.start.max_prefill_tokens)
    return GraphSizes(decode_graph_sizes(max_bs), prefill)

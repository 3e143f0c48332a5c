"""Sizes that CUDA graphs of steps are captured for."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass

from minisgl.config import EngineConfig
from minisgl.engine.parts import RunnerParts
from minisgl.models.pooling_model import PoolingModel

logger = logging.getLogger(__name__)

PREFILL_SIZES = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))  # tokens
# Tokens x weights of a layer whose products take a fast GPU as long as the layer's launches take the host.
_LAUNCH_WORTH = 32e9


def decode_graph_sizes(max_bs: int) -> list[int]:
    """Return 1, 2, 4, 8, then every 8 up to 256 and every 32 beyond: padding stays below an eighth of a large batch."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_bs + 1, 32)]
    return sorted({size for size in sizes if size < max_bs} | {max_bs})


def prefill_graph_sizes(max_tokens: int, layer_weights: int) -> list[int]:
    """Return the token counts worth capturing, of steps of up to `max_tokens`: larger ones outlast the launches."""
    useful = int(min(max_tokens, _LAUNCH_WORTH / layer_weights))
    return list(PREFILL_SIZES[: bisect_left(PREFILL_SIZES, useful) + 1])


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes to capture, both ascending."""

    decode: list[int]  # rows
    prefill: list[int]  # tokens; none where prefills run without graphs

    def __len__(self) -> int:
        return len(self.decode) + len(self.prefill)


def graph_sizes(config: EngineConfig, parts: RunnerParts, max_prefill_tokens: int) -> GraphSizes | None:
    """Return the sizes to capture; None where there are no graphs."""
    if parts.device.type == "cpu":
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
        logger.warning("steps run without CUDA graphs, which cannot hold the %s", unsafe)
        return None
    prefill = []
    if parts.attention.prefill_graph_safe and parts.model.prefill_graph_safe(parts.ops):
        prefill = prefill_graph_sizes(max_prefill_tokens, parts.model.layer_weights)
    return GraphSizes(decode_graph_sizes(max_bs), prefill)

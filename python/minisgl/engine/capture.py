"""How work on a GPU becomes a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class GraphMemory:
    """What all graphs of an engine use between their first kernel and their last: no two of them run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The launches of `run`, which are those of the current stream, and what it returned: every replay writes it.

        A graph keeps no reference to the tensors it reads: its owner keeps what was alive at its capture.
        """
        run()  # libraries allocate their workspaces at the first call, which a graph must not hold
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            result = run()
        return graph, result

"""CUDA graphs of prefills of all sizes, on any machine."""

from __future__ import annotations

from minisgl.engine.cuda_graphs.graphs import Graphs
from minisgl.engine.cuda_graphs.sizes import PREFILL_SIZES, GraphSizes, decode_graph_sizes, prefill_graph_sizes
from minisgl.engine.engine import Engine


def capture_all_prefills(engine: Engine) -> None:
    """Capture graphs of all sizes: an engine has only those that its trial finds faster, which varies."""
    sizes = GraphSizes(decode_graph_sizes(engine.num_slots), prefill_graph_sizes(PREFILL_SIZES[-1]))
    engine._graphs = engine._queue.call(lambda: Graphs(engine._runner, sizes, lambda: None))

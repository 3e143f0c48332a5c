"""Engines that answer the same offline work: ours and its peers, each behind `OfflineEngine`."""

from minisgl.benchmark.engines.base import ENGINES, EngineOptions, OfflineEngine, make_engine

__all__ = ["ENGINES", "EngineOptions", "OfflineEngine", "make_engine"]

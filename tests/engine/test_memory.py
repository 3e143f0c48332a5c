"""How many pages the KV pool gets, and what the user is told when they do not fit."""

from __future__ import annotations

import pytest
import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.memory import free_bytes, pool_pages

CONFIG = EngineConfig(model_path="")


def test_as_many_as_fit_and_are_useful() -> None:
    assert pool_pages(CONFIG, page_bytes=100, useful_pages=1000, free=5050) == 50
    assert pool_pages(CONFIG, page_bytes=100, useful_pages=20, free=5050) == 20


def test_what_the_user_asks_for() -> None:
    config = EngineConfig(model_path="", num_pages=7)
    assert pool_pages(config, page_bytes=100, useful_pages=5, free=5050) == 7
    with pytest.raises(ConfigError, match=r"7 pages.*--memory-ratio 0.9"):
        pool_pages(config, page_bytes=100, useful_pages=5, free=650)


def test_not_even_one_page_fits() -> None:
    with pytest.raises(ConfigError, match="too little memory"):
        pool_pages(CONFIG, page_bytes=100, useful_pages=5, free=-3)


def test_lesson_16_ranks_on_one_machine_share_its_memory() -> None:
    cpu = torch.device("cpu")
    assert free_bytes(cpu, 0.5, tp_size=4) <= free_bytes(cpu, 0.5, tp_size=1) // 3

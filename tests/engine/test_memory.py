"""Pages of the KV pool, and the message to the user when they do not fit."""

from __future__ import annotations

import os

import pytest
import torch

from minisgl import LLM
from minisgl.attention.base import AttentionInputs, AttentionPlan
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.memory import CPU_POOL_LIMIT, MemoryBudget, Needs, memory_budget, pool_pages
from minisgl.engine.step_trial import largest_step, longest_step, run_trial
from minisgl.limits import MAX_LOGPROBS

CONFIG = EngineConfig(model_path="")
GIB = 1 << 30


def budget(pool: int) -> MemoryBudget:
    return MemoryBudget(pool, total=100_000, free=60_000, needs=Needs(steps=40, graphs=60))


def test_the_pool_has_as_many_pages_as_fit_and_are_useful() -> None:
    assert pool_pages(CONFIG, pool_bytes=lambda pages: 100 * pages, useful_pages=1000, budget=budget(5050)) == 50
    assert pool_pages(CONFIG, pool_bytes=lambda pages: 100 * pages, useful_pages=20, budget=budget(5050)) == 20
    assert pool_pages(CONFIG, pool_bytes=lambda pages: 100 * pages, useful_pages=20, budget=budget(150)) == 1


def test_num_pages_overrides_the_computed_size() -> None:
    config = EngineConfig(model_path="", num_pages=7)
    assert pool_pages(config, pool_bytes=lambda pages: 100 * pages, useful_pages=5, budget=budget(5050)) == 7


def test_too_many_pages_name_the_values_that_fit() -> None:
    config = EngineConfig(model_path="", num_pages=40, memory_ratio=0.5)
    of_80_gib = MemoryBudget(pool=30 * GIB, total=80 * GIB, free=70 * GIB, needs=Needs(2 * GIB, GIB))
    with pytest.raises(ConfigError, match=r"40 pages.*40\.00 GiB.*there are 30\.00 GiB") as error:
        pool_pages(config, pool_bytes=lambda pages: GIB * pages, useful_pages=5, budget=of_80_gib)
    assert "of 80.00 GiB 70.00 are free, 2.00 go to steps and 1.00 to CUDA graphs" in str(error.value)
    assert str(error.value).endswith("What would do: --num-pages 30, or --memory-ratio 0.63")
    # They do.
    more = MemoryBudget(pool=30 * GIB + int(0.13 * 80 * GIB), total=80 * GIB, free=70 * GIB)
    assert pool_pages(config, pool_bytes=lambda pages: GIB * pages, useful_pages=5, budget=more) == 40


def test_not_even_one_page_fits() -> None:
    with pytest.raises(ConfigError, match=r"too little memory.*--memory-ratio 0\.91$"):
        pool_pages(CONFIG, pool_bytes=lambda pages: 100 * pages, useful_pages=5, budget=budget(-3))
    with pytest.raises(ConfigError, match=r"more ranks \(--tp\)"):
        pool_pages(CONFIG, pool_bytes=lambda pages: 100 * pages, useful_pages=5, budget=budget(-50_000))


def test_ranks_on_one_machine_share_its_memory() -> None:
    cpu = torch.device("cpu")
    alone, four = (memory_budget(cpu, 0.5, tp_size, Needs()).pool for tp_size in (1, 4))
    assert four <= alone // 3


@pytest.mark.parametrize("ratio", [1e-4, 0.5])
def test_on_the_cpu_a_share_of_the_free_memory_is_taken_but_never_very_much(ratio: float) -> None:
    found = memory_budget(torch.device("cpu"), ratio, 1, Needs())
    assert 1 << 20 < found.free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.pool == pytest.approx(min(ratio * found.free, CPU_POOL_LIMIT), abs=1)


@pytest.mark.parametrize(("slots", "longest", "tokens"), [(8, 100, 64), (8, 100, 500), (8, 10, 8192), (64, 100, 5)])
def test_the_largest_step(slots: int, longest: int, tokens: int) -> None:
    batch = largest_step(slots, longest, tokens)
    assert batch.num_tokens == min(max(tokens, slots), slots * longest)  # decodes are not bounded by a prefill
    assert len(batch.slots) == slots
    assert batch.query_lens.min() >= 1
    assert batch.query_lens.max() <= longest


@pytest.mark.parametrize(
    ("slots", "longest", "tokens"), [(8, 100, 64), (8, 100, 500), (1, 10, 1), (64, 100, 5), (2, 2, 9)]
)
def test_the_longest_step_follows_a_prefix_and_returns_logprobs(slots: int, longest: int, tokens: int) -> None:
    batch = longest_step(slots, longest, tokens)
    assert batch.start_pos[0] + batch.query_lens[0] == longest - 1
    assert batch.query_lens[0] == min(max(tokens - slots + 1, 1), longest - 1)
    assert batch.logprobs is not None
    assert (batch.logprobs.prompt_lens == batch.query_lens).all()
    assert batch.logprobs.top == batch.logprobs.prompt_top == MAX_LOGPROBS


def test_the_memory_trial_attends_to_a_prefix_and_scores_every_token() -> None:
    """The GPU's memory trial runs here in an engine on the CPU; its results are not used, but all of it is computed."""
    with LLM("demo", device="cpu", max_running_req=3, max_seq_len_override=200, num_page_override=16) as llm:
        runner = llm._engine._runner
        seen: list[tuple[int, int]] = []
        plan = runner.attention.plan

        def spy(inputs: AttentionInputs) -> AttentionPlan:
            seen.append((int(inputs.query_lens.max()), int(inputs.kv_lens.max())))
            return plan(inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner.attention, "plan", spy)
            result = llm._engine._queue.call(lambda: run_trial(runner, longest_step(3, 200, 64)))
        assert seen == [(62, 199)]
        assert result.logprobs is not None
        assert result.logprobs.top.shape == (3, MAX_LOGPROBS)
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs.top.shape == (64, MAX_LOGPROBS)

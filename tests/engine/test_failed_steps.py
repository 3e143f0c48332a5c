"""A real engine whose steps find too little memory: the allocator refuses, and still every request is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core import DeviceOutOfMemory, StepResult
from minisgl.engine.queue import CpuQueue

T = TypeVar("T")

PROMPTS = [f"{word} is a word." for word in ("One", "Two", "Three", "Four", "Five", "Six")]


def too_much() -> torch.Tensor:
    """Request more memory than any allocator has."""
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", "float32", max_running_req=4, num_page_override=64, page_size=16, device="cpu") as llm:
        yield llm


def test_the_allocators_refusal_is_known_and_nothing_else() -> None:
    queue = CpuQueue()
    with pytest.raises(DeviceOutOfMemory, match="can't allocate memory"):
        queue.submit(lambda: StepResult(too_much()))()
    forward = queue.launch(too_much)
    with pytest.raises(DeviceOutOfMemory):
        queue.submit(lambda: StepResult(forward()))()

    def refuse() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")

    with pytest.raises(DeviceOutOfMemory, match=r"2\.00 GiB\.$"):
        queue.submit(lambda: StepResult(refuse()))()
    with pytest.raises(RuntimeError, match="size of tensor") as error:
        queue.launch(lambda: torch.ones(2) + torch.ones(3))()
    assert not isinstance(error.value, DeviceOutOfMemory)
    with pytest.raises(RuntimeError, match="can't allocate") as error:
        queue.call(too_much)  # a call is no step: the caller handles its error
    assert not isinstance(error.value, DeviceOutOfMemory)
    queue.close()


def test_what_is_queued_until_a_failure_is_known_does_not_run() -> None:
    """A step after the failed one may need what that one did not write: with stale page tables it spoils pages."""
    queue, ran = CpuQueue(), []

    def step(name: str) -> StepResult[torch.Tensor]:
        ran.append(name)
        return StepResult(torch.zeros(1))

    queue.submit(lambda: step("before"))()
    forward = queue.launch(too_much)
    failed = queue.submit(lambda: StepResult(forward()))
    later = queue.launch(lambda: ran.append("later"))
    after_it = queue.submit(lambda: step("after it"))
    with pytest.raises(DeviceOutOfMemory):
        failed()
    again = queue.submit(lambda: step("again"))
    for known in (later, after_it):
        with pytest.raises(DeviceOutOfMemory, match="can't allocate memory"):
            known()
    again()
    assert ran == ["before", "again"]
    queue.close()


@pytest.mark.parametrize("where", ["apply", "forward", "sample", "advance"])
@pytest.mark.parametrize("sampled", [False, True])
def test_steps_that_fail_anywhere_change_no_answer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, sampled: bool
) -> None:
    """Every fifth step fails before or after its kernels have run."""
    params = [
        SamplingParams(
            temperature=0.8 if sampled else 0.0,
            seed=index,
            max_tokens=20,
            logprobs=1 if index == 1 else None,
            presence_penalty=0.5 if index == 2 else 0.0,
            ignore_eos=True,
        )
        for index in range(len(PROMPTS))
    ]
    expected = llm.generate(PROMPTS, params)
    runner, steps = llm._engine._runner, 0

    def failing(function: Callable[..., T], *, first: bool) -> Callable[..., T]:
        def call(*args: object, **kwargs: object) -> T:
            nonlocal steps
            steps += 1
            if first and steps % 5 == 0:
                too_much()
            result = function(*args, **kwargs)
            if not first and steps % 5 == 0:
                too_much()
            return result

        return call

    match where:
        case "apply":
            monkeypatch.setattr(runner.state, "apply", failing(runner.state.apply, first=True))
        case "forward":
            monkeypatch.setattr(runner, "forward", failing(runner.forward, first=False))
        case "sample":
            monkeypatch.setattr(runner, "sample", failing(runner.sample, first=True))
        case "advance":
            monkeypatch.setattr(runner, "sample", failing(runner.sample, first=False))
    before = llm.loop.scheduler.failed_steps
    answers = llm.generate(PROMPTS, params)
    llm.check_idle()
    assert llm.loop.scheduler.failed_steps - before >= 4
    for answer, wanted in zip(answers, expected, strict=True):
        assert (answer["token_ids"], answer["finish_reason"]) == (wanted["token_ids"], "length")
        assert [one.chosen.token for one in answer.get("logprobs", [])] == [
            one.chosen.token for one in wanted.get("logprobs", [])
        ]


def test_a_device_without_any_memory_answers_with_errors_and_recovers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    expected = llm.generate(PROMPTS, params)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._runner, "forward", lambda _: too_much())
        answers = llm.generate(PROMPTS, params)
    assert [answer["finish_reason"] for answer in answers] == ["error"] * len(PROMPTS)
    llm.check_idle()
    assert [one["token_ids"] for one in llm.generate(PROMPTS, params)] == [one["token_ids"] for one in expected]

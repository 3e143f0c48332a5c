"""An exception such as that of Ctrl-C, at any line of the scheduler: what it may have spoiled is noticed."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from minisgl.message.packed_ids import unpack_ids
from minisgl.sampling_params import SamplingParams
from scheduler.simulation import World, expected_answer, random_prompt

WORLDS: list[dict[str, object]] = [
    {"page_size": 2, "num_pages": 30, "chunk": 7, "batch_policy": "mixed", "max_seq_len": 40},
    {"page_size": 2, "num_pages": 40, "chunk": 7, "window": 5, "num_window_pages": 20, "max_seq_len": 40},
    {"page_size": 2, "num_pages": 40, "chunk": 9, "snapshots": 4, "max_seq_len": 40, "overlap": False},
]
FOLDERS = "minisgl/scheduler/", "minisgl/kvcache/"
TRIALS = 40
MOST_STEPS = 4  # as many as an LLM gives the steps in flight


class Interruption(BaseException):
    pass


class Lines:
    """Tracer that counts the lines run in FOLDERS, and interrupts line number `last`."""

    def __init__(self, last: int) -> None:
        self.count, self._last = 0, last

    def __call__(self, frame: FrameType, event: str, _: Any) -> Lines | None:
        if not any(folder in frame.f_code.co_filename for folder in FOLDERS):
            return None
        if event == "line":
            self.count += 1
            if self.count == self._last:
                raise Interruption
        return self


@pytest.mark.parametrize("options", WORLDS, ids=str)
def test_a_change_that_was_interrupted_is_noticed(options: dict[str, object]) -> None:
    """Otherwise the requests end, nothing is lost, and later ones get the answers that they would get alone."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, families=2, longest=20) for _ in range(6)]
    params = [SamplingParams(max_tokens=rng.randint(1, 18), ignore_eos=True) for _ in prompts]

    def run(world: World) -> dict[int, list[int]]:
        answers: dict[int, list[int]] = {seq_id: [] for seq_id in range(len(prompts))}
        for seq_id, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            world.scheduler.add(seq_id, np.array(prompt, dtype=np.int32), one, seed=0)
        while world.loop.has_work:
            output = world.loop.step()
            for seq_id, token in zip(output.seq_ids, unpack_ids(output.tokens).tolist(), strict=True):
                answers[seq_id].append(token)
        return answers

    def run_until(last: int) -> tuple[World, int]:
        world, lines, tracer = World(**options), Lines(last), sys.gettrace()  # type: ignore[arg-type]
        sys.settrace(lines)
        try:
            run(world)
        except Interruption:
            pass
        finally:
            sys.settrace(tracer)
        return world, lines.count

    expected = {
        seq_id: expected_answer(np.array(prompt), one)
        for seq_id, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    }
    _, total = run_until(last=-1)
    noticed = 0
    for last in np.linspace(1, total, TRIALS).astype(int).tolist():
        world, _ = run_until(last)
        if not world.scheduler.is_broken:
            for seq_id in range(len(prompts)):
                world.scheduler.end(seq_id, "abort")
            for _ in range(MOST_STEPS):
                if world.loop.has_work:
                    world.loop.step()
        if world.scheduler.is_broken or world.loop.has_work:
            noticed += 1
            continue
        world.scheduler.check_idle()
        assert run(world) == expected
    assert noticed > TRIALS / 2

"""Trial of launches: how long they take the host, and how large a prefill must be to take the GPU longer.

A host launches a layer's operations in 0.1 to 0.6 ms, depending on the machine and on the ranks' all-reduces.
"""

from __future__ import annotations

from time import perf_counter

import torch

from minisgl.core import Batch
from minisgl.engine.forward import StepRunner

_RUNS = 2  # the fastest counts
_MOST_CYCLES = 2e9  # of a GPU in a second


def launch_seconds(runner: StepRunner, prompt: Batch) -> float:
    """Return the seconds that the host takes to launch a step operation by operation.

    `prompt` should be so short that the device keeps up, because its queue of launches is finite.
    """
    runner.forward(prompt)  # loads and tunes kernels
    return min(_host_seconds(runner, prompt) for _ in range(_RUNS))


def launched_tokens(runner: StepRunner, prompt: Batch) -> int:
    """Return the number of prompt tokens that the device computes in the time of a step's launches, one by one.

    Steps of fewer tokens are faster in a graph. The number is extrapolated from the times of `prompt`.
    """
    launching = launch_seconds(runner, prompt)
    running = min(_device_seconds(runner, prompt, launching) for _ in range(_RUNS))
    return max(int(prompt.num_tokens * launching / running), 1)


def _host_seconds(runner: StepRunner, prompt: Batch) -> float:
    """Return the seconds that the host takes to launch a step on an idle device."""
    torch.cuda.synchronize(runner.state.device)
    begin = perf_counter()
    runner.forward(prompt)
    return perf_counter() - begin


def _device_seconds(runner: StepRunner, prompt: Batch, ahead: float) -> float:
    """Return the seconds of a step on the device, which begins it when the host is `ahead` seconds ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(int(ahead * _MOST_CYCLES))  # type: ignore[no-untyped-call]
    begin.record()
    runner.forward(prompt)
    end.record()
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds

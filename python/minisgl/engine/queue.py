"""Where steps run one after another behind the host's back: a CUDA stream, or a thread for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minisgl.core import Int32Array

T = TypeVar("T")


class PendingTokens(Protocol):
    """The sampled tokens of a step under way."""

    def tokens(self) -> Int32Array:
        """Wait for the step and return its tokens."""
        ...


class DeviceQueue(Protocol):
    """Runs functions in the order of submission."""

    def submit(self, step: Callable[[], Tensor]) -> PendingTokens:
        """Queue a step that returns its sampled tokens [S] on the device; return at once."""
        ...

    def call(self, function: Callable[[], T]) -> T:
        """Run a function behind what is queued and wait for its effects."""
        ...

    def close(self) -> None: ...


class _CpuTokens:
    def __init__(self, future: Future[Int32Array]) -> None:
        self._future = future

    def tokens(self) -> Int32Array:
        return self._future.result()


class CpuQueue:
    """One thread is the device: torch releases the interpreter while it computes, so the host works meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-device")

    def submit(self, step: Callable[[], Tensor]) -> _CpuTokens:
        def run() -> Int32Array:
            with torch.inference_mode():
                array: Int32Array = step().int().numpy()
                return array

        return _CpuTokens(self._thread.submit(run))

    def call(self, function: Callable[[], T]) -> T:
        def run() -> T:
            with torch.inference_mode():
                return function()

        return self._thread.submit(run).result()

    def close(self) -> None:
        self._thread.shutdown()


class _CudaTokens:
    def __init__(self, host: Tensor, done: torch.cuda.Event) -> None:
        self._host = host
        self._done = done

    def tokens(self) -> Int32Array:
        self._done.synchronize()
        array: Int32Array = self._host.numpy()
        return array


class CudaQueue:
    """A stream of its own. Tokens are copied to pinned memory behind the step; waiting for an event reads them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, step: Callable[[], Tensor]) -> _CudaTokens:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            sampled = step()
            host = torch.empty(sampled.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(sampled, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _CudaTokens(host, done)

    def call(self, function: Callable[[], T]) -> T:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            result = function()
        self._stream.synchronize()
        return result

    def close(self) -> None:
        self._stream.synchronize()


def make_queue(device: torch.device) -> DeviceQueue:
    return CudaQueue(device) if device.type == "cuda" else CpuQueue()

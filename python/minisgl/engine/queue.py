"""Queues of steps that run one after another behind the host's back: a CUDA stream, or a thread for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minisgl.core import AnyArray, DeviceOutOfMemory, Int32Array, StepLogprobs, StepResult
from minisgl.engine.cpu_threads import StepThreads
from minisgl.engine.landing import OutputBuffer, make_token_copy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Outcome of a step, on its device."""

    tokens: Tensor  # [S] int32: sampled
    logprobs: StepLogprobs[Tensor] | None = None  # if asked for


# How torch, cuBLAS and CUDA's driver word it. Not all of them raise torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")


def run_step(step: Callable[[], T]) -> T:
    """Call `step`; a lack of memory becomes DeviceOutOfMemory, and memory that torch keeps for reuse is given back."""
    try:
        return step()
    except Exception as error:
        if not (isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)):
            raise
        message = str(error).partition("\n")[0]
    # Behind the handler, for the error's traceback holds the step's tensors.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    raise DeviceOutOfMemory(message)


class DeviceQueue(Protocol):
    """Runs functions in the order of submission.

    DeviceOutOfMemory comes from `submit` or `launch` where the device is a stream, and where it is a thread, from what
    they return.
    """

    def submit(self, step: Callable[[], StepTensors]) -> StepResult:
        """Queue a step; return at once."""
        ...

    def launch(self, function: Callable[[], T]) -> Callable[[], T]:
        """Queue a function; return at once what gives its result to functions that are queued later."""
        ...

    def call(self, function: Callable[[], T]) -> T:
        """Run a function behind what is queued and wait for its effects."""
        ...

    def close(self) -> None: ...


def _as_arrays(logprobs: StepLogprobs[Tensor] | None) -> StepLogprobs[AnyArray] | None:
    """View tensors on the host as arrays that share their memory."""
    return None if logprobs is None else logprobs.map(lambda tensor: tensor.numpy())


class _CpuTokens:
    def __init__(self, future: Future[tuple[Int32Array, StepLogprobs[AnyArray] | None]]) -> None:
        self._future = future

    def tokens(self) -> Int32Array:
        return self._future.result()[0]

    def logprobs(self) -> StepLogprobs[AnyArray] | None:
        return self._future.result()[1]


class CpuQueue:
    """One thread is the device: torch releases the interpreter while it computes, so the host works meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-device")
        self._step_threads = StepThreads()

    def submit(self, step: Callable[[], StepTensors]) -> _CpuTokens:
        def run() -> tuple[Int32Array, StepLogprobs[AnyArray] | None]:
            with torch.inference_mode(), self._step_threads:
                result = run_step(step)
                array: Int32Array = result.tokens.numpy()
                return array, _as_arrays(result.logprobs)

        return _CpuTokens(self._thread.submit(run))

    def launch(self, function: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            with torch.inference_mode(), self._step_threads:
                return run_step(function)

        return self._thread.submit(run).result

    def call(self, function: Callable[[], T]) -> T:
        def run() -> T:
            with torch.inference_mode():
                return function()

        return self._thread.submit(run).result()

    def close(self) -> None:
        self._thread.shutdown()


class _CudaTokens:
    """The host's copies. When the tokens have been read, the next step may land in their place."""

    def __init__(
        self,
        buffer: OutputBuffer,
        count: int,
        logprobs: StepLogprobs[Tensor] | None,
        give_back: Callable[[OutputBuffer], None],
    ) -> None:
        self._buffer: OutputBuffer | None = buffer
        self._tokens: Int32Array = buffer.memory.numpy()[:count]
        self._logprobs = logprobs
        self._give_back = give_back

    def tokens(self) -> Int32Array:
        buffer = self._buffer
        if buffer is not None:
            buffer.done.synchronize()
            self._tokens = self._tokens.copy()
            self._buffer = None  # first: Ctrl-C must not let it be given back twice
            self._give_back(buffer)
        return self._tokens

    def logprobs(self) -> StepLogprobs[AnyArray] | None:
        self.tokens()
        return _as_arrays(self._logprobs)


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, there when the stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class CudaQueue:
    """A stream of its own, which makes itself the current one in a fraction of the time of `torch.cuda.stream`.

    Tokens land in pinned memory behind the step; waiting for an event reads them.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._num_slots = num_slots  # of which a step samples
        self._free: list[OutputBuffer] = []
        self._buffers: list[OutputBuffer] = []  # all: a kernel may yet write to one that nobody waits for any more
        self._copy_tokens = make_token_copy(device)

    def submit(self, step: Callable[[], StepTensors]) -> _CudaTokens:
        with torch.inference_mode(), self._stream:
            return run_step(lambda: self._launch_step(step))

    def _launch_step(self, step: Callable[[], StepTensors]) -> _CudaTokens:
        result = step()
        logprobs = None if result.logprobs is None else result.logprobs.map(_copy_to_host)
        buffer = self._free.pop() if self._free else self._make_buffer()  # behind all that may find no memory
        self._copy_tokens(result.tokens, buffer.memory)
        buffer.done.record(self._stream)
        return _CudaTokens(buffer, len(result.tokens), logprobs, self._free.append)

    def _make_buffer(self) -> OutputBuffer:
        memory = torch.empty(self._num_slots, dtype=torch.int32, pin_memory=True)
        buffer = OutputBuffer(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._buffers.append(buffer)
        return buffer

    def launch(self, function: Callable[[], T]) -> Callable[[], T]:
        with torch.inference_mode(), self._stream:
            result = run_step(function)
        return lambda: result

    def call(self, function: Callable[[], T]) -> T:
        with torch.inference_mode(), self._stream:
            result = function()
        self._stream.synchronize()
        return result

    def close(self) -> None:
        self._stream.synchronize()


def make_queue(device: torch.device, num_slots: int) -> DeviceQueue:
    """`num_slots`: rows that a step samples, at most."""
    return CudaQueue(device, num_slots) if device.type == "cuda" else CpuQueue()

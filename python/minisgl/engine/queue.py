"""Queues of steps that run one after another behind the host's back: a CUDA stream, or a thread for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minisgl.core import AnyArray, DeviceOutOfMemory, Int32Array, PendingStep, StepResult
from minisgl.engine.cpu_threads import StepThreads, name_thread
from minisgl.kernel.availability import kernels_missing
from minisgl.kernel.signature import KernelSpec

T = TypeVar("T")

# Messages of torch, cuBLAS and CUDA's driver. Not all of them raise torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")
_COPY_THREADS = 256


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
    """Queue of functions that run in the order of submission.

    DeviceOutOfMemory comes from `submit` or `launch` where the device is a stream, and where it is a thread, from what
    they return.
    """

    def submit(self, step: Callable[[], StepResult[Tensor]]) -> PendingStep:
        """Queue a step; return at once what waits for its result."""

    def launch(self, function: Callable[[], T]) -> Callable[[], T]:
        """Queue a function; return at once what gives its result to functions that are queued later."""

    def call(self, function: Callable[[], T]) -> T:
        """Run a function behind what is queued and wait for its effects."""

    def close(self) -> None: ...


def _as_array(tensor: Tensor) -> AnyArray:
    """View a tensor on the host as an array that shares its memory."""
    array: AnyArray = tensor.numpy()
    return array


class CpuQueue:
    """Queue whose device is a thread: torch releases the interpreter while it computes, so the host works meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "cpu-device", initializer=name_thread)
        self._step_threads = StepThreads()

    def submit(self, step: Callable[[], StepResult[Tensor]]) -> PendingStep:
        return self.launch(lambda: step().map(_as_array))

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


@dataclass(frozen=True, slots=True)
class OutputBuffer:
    """Pinned memory for the tokens of one step, and the event behind their device-to-host copy."""

    memory: Tensor  # [n] int32, pinned
    done: torch.cuda.Event


class _CudaStep:
    """A step under way on a stream. When its tokens have been read, another step's may take their place."""

    def __init__(
        self,
        buffer: OutputBuffer,
        count: int,
        rest: StepResult[Tensor],  # results besides tokens, on the host when the event is done
        give_back: Callable[[OutputBuffer], None],
    ) -> None:
        self._buffer: OutputBuffer | None = buffer
        self._tokens: Int32Array = buffer.memory.numpy()[:count]
        self._rest = rest
        self._give_back = give_back

    def __call__(self) -> StepResult[AnyArray]:
        buffer = self._buffer
        if buffer is not None:
            buffer.done.synchronize()
            self._tokens = self._tokens.copy()
            self._buffer = None  # first: Ctrl-C must not let it be given back twice
            self._give_back(buffer)
        return self._rest.map_rest(self._tokens, _as_array)


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, there when the stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class CudaQueue:
    """Queue on a stream of its own, made the current one in a fraction of the time of `torch.cuda.stream`.

    Behind each step its tokens are copied to a pinned output buffer; waiting for an event reads them.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._num_slots = num_slots  # most rows that a step samples
        self._free: list[OutputBuffer] = []
        self._buffers: list[OutputBuffer] = []  # all: a kernel may yet write to one that nobody waits for any more
        self._copy_tokens = token_copier(device)

    def submit(self, step: Callable[[], StepResult[Tensor]]) -> PendingStep:
        with torch.inference_mode(), self._stream:
            return run_step(lambda: self._launch_step(step))

    def _launch_step(self, step: Callable[[], StepResult[Tensor]]) -> _CudaStep:
        result = step()
        rest = result.map_rest(result.tokens, _copy_to_host)
        buffer = self._free.pop() if self._free else self._make_buffer()  # behind all that may find no memory
        self._copy_tokens(result.tokens, buffer.memory)
        buffer.done.record(self._stream)
        return _CudaStep(buffer, len(result.tokens), rest, self._free.append)

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


def token_copier(device: torch.device) -> Callable[[Tensor, Tensor], object]:
    """Return what copies tokens [n] int32 of the device to the beginning of pinned memory, in stream order."""
    if kernels_missing(device) is not None:
        return lambda tokens, memory: memory[: len(tokens)].copy_(tokens, non_blocking=True)
    from minisgl.kernel.compile import Compiler

    kernel = Compiler(device).kernel(KernelSpec, "copy_tokens.cu", "copy_tokens")

    def copy(tokens: Tensor, memory: Tensor) -> None:
        if count := len(tokens):
            blocks = -(-count // _COPY_THREADS)
            kernel((blocks,), _COPY_THREADS, tokens=tokens, host=memory, count=count)

    return copy


def make_queue(device: torch.device, num_slots: int) -> DeviceQueue:
    """Return the device's queue of steps, each of which samples in at most `num_slots` rows."""
    return CudaQueue(device, num_slots) if device.type == "cuda" else CpuQueue()

"""Queues of steps, which run one after another while the host continues: a CUDA stream, or a thread for the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minisgl.core import AnyArray, DeviceOutOfMemory, Int32Array, PendingStep, StepResult
from minisgl.engine.cpu_threads import StepThreads, name_thread
from minisgl.kernel.availability import kernels_missing
from minisgl.kernel.launch.signature import KernelSpec
from minisgl.step_cost import LAUNCH_MARGIN

T = TypeVar("T")

# Messages of torch, cuBLAS and CUDA's driver. Not all of them raise torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")
_COPY_THREADS = 256


def run_step(step: Callable[[], T]) -> T:
    """Call `step`. If it runs out of memory, empty torch's cache and raise DeviceOutOfMemory."""
    try:
        return step()
    except Exception as error:
        if not (isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)):
            raise
        message = str(error).partition("\n")[0]
    # After the handler, because the error's traceback holds the step's tensors.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    raise DeviceOutOfMemory(message)


class DeviceQueue(Protocol):
    """Queue of functions that run in the order of submission.

    On a stream, `submit` and `launch` raise DeviceOutOfMemory themselves; on a thread, the functions that they return
    do.
    """

    def begin(self) -> None:
        """Mark the beginning of the step that is submitted next, for a device that measures its seconds."""

    def submit(self, step: Callable[[], StepResult[Tensor]]) -> PendingStep:
        """Queue a step; return at once a function that waits for its result."""

    def launch(self, function: Callable[[], T]) -> Callable[[], T]:
        """Queue a function; return at once a function that gives its result to functions that are queued later."""

    def call(self, function: Callable[[], T]) -> T:
        """Run a function after those in the queue, and wait for its end on the device."""

    def close(self) -> None: ...


def _as_array(tensor: Tensor) -> AnyArray:
    """Return a CPU tensor as an array that shares its memory."""
    array: AnyArray = tensor.numpy()
    return array


class CpuQueue:
    """Queue that is a thread: torch releases the GIL while it computes, so the host can continue.

    The host learns late that a step has run out of memory. Functions that it has queued until then are not executed,
    but fail too: they may need what that step did not write, such as the pages of a row.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "cpu-device", initializer=name_thread)
        self._step_threads = StepThreads()
        self._known_failures = 0  # number of failed steps that the host has learned of
        self._failure: tuple[int, str] | None = None  # `_known_failures` of the last failed function, and its message

    def begin(self) -> None:
        """Do nothing: the step loop measures a CPU's steps by the host's clock."""

    def submit(self, step: Callable[[], StepResult[Tensor]]) -> PendingStep:
        pending = self.launch(lambda: step().map(_as_array))

        def result() -> StepResult[AnyArray]:
            try:
                return pending()
            except DeviceOutOfMemory:
                self._known_failures += 1
                raise

        return result

    def launch(self, function: Callable[[], T]) -> Callable[[], T]:
        known = self._known_failures

        def run() -> T:
            if self._failure is not None and self._failure[0] == known:
                raise DeviceOutOfMemory(self._failure[1])
            try:
                with torch.inference_mode(), self._step_threads:
                    return run_step(function)
            except DeviceOutOfMemory as error:
                self._failure = known, str(error)
                raise

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
    """Pinned memory for the tokens of one step, and the event recorded after their device-to-host copy."""

    memory: Tensor  # [n] int32, pinned
    done: torch.cuda.Event  # timed


class _StepTimer:
    """Measures a step on a stream, from the timer's construction on."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record(stream)
        self._began_at = perf_counter()
        self._launching = 0.0  # seconds in which the host launched while the device was at the step already

    def launched(self) -> None:
        """Note that all launches of the forward have been made."""
        if self._begin.query():  # type: ignore[no-untyped-call]
            self._launching = perf_counter() - self._began_at

    def seconds(self, end: torch.cuda.Event) -> float:
        """Return the device's seconds; NaN if the device may have waited for the host's launches."""
        seconds: float = self._begin.elapsed_time(end) / 1e3
        return seconds if seconds >= LAUNCH_MARGIN * self._launching else math.nan


class _CudaStep:
    """Step in flight on a stream. Its output buffer is reused once the tokens have been read."""

    def __init__(
        self,
        buffer: OutputBuffer,
        count: int,
        rest: StepResult[Tensor],  # results other than tokens, on the host once the event is complete
        timer: _StepTimer | None,
        give_back: Callable[[OutputBuffer], None],
    ) -> None:
        self._buffer: OutputBuffer | None = buffer
        self._tokens: Int32Array = buffer.memory.numpy()[:count]
        self._rest = rest
        self._timer = timer
        self._give_back = give_back

    def __call__(self) -> StepResult[AnyArray]:
        buffer = self._buffer
        if buffer is not None:
            buffer.done.synchronize()
            if self._timer is not None:
                self._rest = dataclasses.replace(self._rest, seconds=self._timer.seconds(buffer.done))
            self._tokens = self._tokens.copy()
            self._buffer = None  # before `_give_back`: Ctrl-C in between must not give it back twice
            self._give_back(buffer)
        return self._rest.map_rest(self._tokens, _as_array)


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, which is complete when the stream has reached it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class CudaQueue:
    """Queue on a stream of its own, which `with` makes current in a fraction of the time of `torch.cuda.stream`.

    After each step its tokens are copied to a pinned output buffer; the host waits for an event and reads them.
    The seconds of a step are those between two events on the stream, the first of which waits for the step before it.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._num_slots = num_slots  # largest number of rows that a step samples
        self._free: list[OutputBuffer] = []
        self._buffers: list[OutputBuffer] = []  # keeps all alive: a kernel may still write to one that was abandoned
        self._copy_tokens = token_copier(device)
        self._timer: _StepTimer | None = None  # of the step that is submitted next

    def begin(self) -> None:
        self._timer = _StepTimer(self._stream)

    def submit(self, step: Callable[[], StepResult[Tensor]]) -> PendingStep:
        with torch.inference_mode(), self._stream:
            return run_step(lambda: self._launch_step(step))

    def _launch_step(self, step: Callable[[], StepResult[Tensor]]) -> _CudaStep:
        result = step()
        rest = result.map_rest(result.tokens, _copy_to_host)
        buffer = self._free.pop() if self._free else self._make_buffer()  # after all that may run out of memory
        self._copy_tokens(result.tokens, buffer.memory)
        buffer.done.record(self._stream)
        timer, self._timer = self._timer, None
        return _CudaStep(buffer, len(result.tokens), rest, timer, self._free.append)

    def _make_buffer(self) -> OutputBuffer:
        memory = torch.empty(self._num_slots, dtype=torch.int32, pin_memory=True)
        buffer = OutputBuffer(memory, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._buffers.append(buffer)
        return buffer

    def launch(self, function: Callable[[], T]) -> Callable[[], T]:
        with torch.inference_mode(), self._stream:
            result = run_step(function)
        if self._timer is not None:
            self._timer.launched()
        return lambda: result

    def call(self, function: Callable[[], T]) -> T:
        with torch.inference_mode(), self._stream:
            result = function()
        self._stream.synchronize()
        return result

    def close(self) -> None:
        self._stream.synchronize()


def token_copier(device: torch.device) -> Callable[[Tensor, Tensor], object]:
    """Return a function that copies tokens [n] int32 to the start of pinned memory, in stream order."""
    if kernels_missing(device) is not None:
        return lambda tokens, memory: memory[: len(tokens)].copy_(tokens, non_blocking=True)
    from minisgl.kernel.launch.compile import Compiler

    kernel = Compiler(device).kernel(KernelSpec, "copy_tokens.cu", "copy_tokens")

    def copy(tokens: Tensor, memory: Tensor) -> None:
        if count := len(tokens):
            blocks = -(-count // _COPY_THREADS)
            kernel((blocks,), _COPY_THREADS, tokens=tokens, host=memory, count=count)

    return copy


def make_queue(device: torch.device, num_slots: int) -> DeviceQueue:
    """Return the device's queue of steps; each step samples in at most `num_slots` rows."""
    return CudaQueue(device, num_slots) if device.type == "cuda" else CpuQueue()

"""Compiles csrc/ at start with NVRTC, through NVIDIA's cuda-core: no toolkit, no headers, milliseconds a file.

What was compiled is kept in the user's cache folder, where later starts find it.
A kernel of these is launched on torch's current stream and so is captured by torch's CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver
from cuda.bindings.driver import CUfunction_attribute as _Attribute
from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, Stream, launch
from cuda.core.utils import FileStreamProgramCache, InMemoryProgramCache, make_program_cache_key
from torch import Tensor

import minisgl

SCALAR_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3",  # of the KV cache only (fp8.cuh)
}

# Of a multiprocessor's 256 KiB, while it multiplies what attention then begins to read: what attention streams from
# memory passes L1, which is the rest. One of the sizes that there are.
SHARED_BEFORE_ATTENTION = 132 << 10


def address(tensor: Tensor | None) -> int:
    """What a kernel gets for a tensor that need not be there: where it begins, or 0."""
    return 0 if tensor is None else tensor.data_ptr()


class Kernel:
    """One compiled kernel; calling it launches it on torch's current stream."""

    def __init__(
        self, kernel: Any, device_id: int, streams: dict[int, Stream], *, begins_early: bool, shared_bytes: int
    ) -> None:
        self._kernel = kernel
        self._device_id = device_id
        self._streams = streams  # by torch's handle, shared by all kernels of a compiler
        self._begins_early = begins_early
        self._shared_bytes = shared_bytes

    def __call__(self, grid: tuple[int, ...], block: int, *args: Any, cluster: int = 1, early: bool = True) -> None:
        """Arguments: tensors' data_ptr() for pointers, NumPy scalars of the exact type for the rest.

        With a `cluster` of more than one block, the grid counts clusters, which lie along its first axis. Without
        `early` it waits for its predecessor's end, also if it was compiled to begin early.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._device_id)  # torch.cuda.current_stream() takes 4 us
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = Stream.from_handle(handle)
        config = LaunchConfig(
            grid=grid,
            block=block,
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            shmem_size=self._shared_bytes,
            programmatic_stream_serialization=early and self._begins_early,
        )
        launch(stream, config, self._kernel, *args)


class Compiler:
    """Compiles files of csrc/ for one device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = Device(device.index or 0)
        self._device.set_current()
        self.arch = int(self._device.arch)  # its compute capability: 90 for 9.0
        self.num_sms = int(self._device.properties.multiprocessor_count)
        self.block_shared_bytes = int(self._device.properties.max_shared_memory_per_block_optin)  # a block's, at most
        self._streams: dict[int, Stream] = {}
        self._folder = Path(minisgl.__file__).parent / "csrc"
        headers = b"".join(path.read_bytes() for path in sorted(self._folder.glob("*.cuh")))
        self._headers = sha256(headers).digest()
        try:
            self._cache = FileStreamProgramCache()
        except OSError:  # no home, or one that may not be written
            self._cache = InMemoryProgramCache()
        self._begun: dict[tuple[str, frozenset[tuple[str, str | int]]], Future[ObjectCode]] = {}

    def begin(self, file: str, variants: Iterable[Mapping[str, str | int]]) -> None:
        """Begin to compile a file with each of these sets of macros, for which `compile` will be called.

        In threads, for NVRTC works without the interpreter's lock.
        """
        threads = ThreadPoolExecutor(thread_name_prefix="nvrtc")
        for macros in variants:
            self._begun[file, frozenset(macros.items())] = threads.submit(self._module, file, macros)
        threads.shutdown(wait=False)  # they end with their work

    def compile(
        self,
        file: str,
        kernels: tuple[str, ...],
        *,
        begins_early: bool = False,
        shared_bytes: int = 0,
        sm_shared_bytes: int = 0,
        **macros: str | int,
    ) -> list[Kernel]:
        """The named kernels of one file, with these macros defined.

        `begins_early`: they wait for their predecessor themselves (common.cuh), and so may be launched before its end.
        `shared_bytes`: of the shared memory that they use besides what they declare.
        `sm_shared_bytes`: of shared memory on each multiprocessor while it runs them, one of the sizes that
        the hardware has. The rest is L1, also for kernels that begin meanwhile. 0: enough for as many blocks as fit.
        """
        begun = self._begun.pop((file, frozenset(macros.items())), None)
        module = self._module(file, macros) if begun is None else begun.result()
        early = begins_early and self.arch >= 90
        compiled = []
        for name in kernels:
            kernel = module.get_kernel(name)
            if shared_bytes:  # with what is declared it may be more than the 48 KiB that need no asking
                self._set(kernel, _Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            if sm_shared_bytes:
                largest = self._device.properties.max_shared_memory_per_multiprocessor
                percent = min(100 * sm_shared_bytes // largest, 100)  # the device takes the next size above
                self._set(kernel, _Attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent)
            compiled.append(
                Kernel(kernel, self._device.device_id, self._streams, begins_early=early, shared_bytes=shared_bytes)
            )
        return compiled

    def _set(self, kernel: Any, attribute: _Attribute, value: int) -> None:
        (error,) = driver.cuKernelSetAttribute(attribute, value, kernel.handle, self._device.device_id)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{attribute.name} cannot be {value}: {error.name}")

    def _module(self, file: str, macros: Mapping[str, str | int]) -> ObjectCode:
        source = (self._folder / file).read_text()
        options = ProgramOptions(
            std="c++17",
            arch=f"sm_{self.arch}" + ("a" if self.arch == 90 else ""),  # 90a has what Hopper alone can do
            include_path=[str(self._folder)],
            define_macro=[(name, str(value)) for name, value in macros.items()] or None,
        )
        key = make_program_cache_key(
            code=source, code_type="c++", options=options, target_type="cubin", extra_digest=self._headers
        )
        cubin = self._cache.get(key)
        if cubin is not None:
            return ObjectCode.from_cubin(cubin)
        module = Program(source, code_type="c++", options=options).compile("cubin")
        with suppress(OSError):  # a full disk
            self._cache[key] = module
        return module

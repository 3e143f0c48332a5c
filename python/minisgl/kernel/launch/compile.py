"""Compiles csrc/ at start with NVRTC, through NVIDIA's cuda-core: no toolkit, no headers, milliseconds per file.

Compiled code is kept in the user's cache folder, where later starts find it. Kernels are launched on torch's current
stream, so that torch's CUDA graphs capture them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import torch
from cuda.bindings import driver
from cuda.bindings.driver import CUfunction_attribute as _Attribute
from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, Stream, TensorMapDescriptor, launch
from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
from cuda.core.utils import FileStreamProgramCache, InMemoryProgramCache, StridedMemoryView, make_program_cache_key
from torch import Tensor

import minisgl
from minisgl.kernel.launch.signature import KernelSpec, Launcher, Macros, Submit, make_launcher, parse_signature

_MAX_CONFIGS = 1024  # launch configurations kept for a kernel

_ModuleKey: TypeAlias = tuple[str, frozenset[tuple[str, str | int]], int, int]


class Compiler:
    """Compiles kernels for one device and keeps them, for one thread that launches."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = Device(device.index or 0)
        self._device.set_current()
        self.arch = int(self._device.arch)  # its compute capability: 90 for 9.0
        self.num_sms = int(self._device.properties.multiprocessor_count)
        self.block_shared_bytes = int(self._device.properties.max_shared_memory_per_block_optin)  # a block's, at most
        self._streams: dict[int, Stream] = {}  # by torch's handle
        self._folder = Path(minisgl.__file__).parent / "csrc"
        headers = b"".join(path.read_bytes() for path in sorted(self._folder.glob("*.cuh")))
        self._headers = sha256(headers).digest()
        try:
            self._cache = FileStreamProgramCache()
        except OSError:  # no home, or one that may not be written
            self._cache = InMemoryProgramCache()
        self._modules: dict[_ModuleKey, Future[ObjectCode]] = {}
        self._kernels: dict[tuple[Hashable, ...], Launcher] = {}

    def begin(self, specs: Iterable[KernelSpec]) -> None:
        """Begin to compile these kernels, in threads, for NVRTC works without the interpreter's lock."""
        threads = ThreadPoolExecutor(thread_name_prefix="nvrtc")
        for spec in specs:
            key = _module_key(spec)
            if key not in self._modules:
                self._modules[key] = threads.submit(self._compile, spec.file, spec.macros)
        threads.shutdown(wait=False)  # they end with their work

    def kernel(self, describe: Callable[..., KernelSpec], *args: Hashable) -> Launcher:
        """Return the kernel that `describe(*args)` describes, compiled at the first call with these arguments."""
        key = describe, *args
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._make(describe(*args))
        return found

    def _make(self, spec: KernelSpec) -> Launcher:
        self.begin([spec])
        kernel = self._modules[_module_key(spec)].result().get_kernel(spec.name)
        if spec.shared_bytes:  # with static memory it may exceed 48 KiB, which must be requested
            self._set(kernel, _Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, spec.shared_bytes)
        if spec.sm_shared_bytes:
            largest = self._device.properties.max_shared_memory_per_multiprocessor
            percent = min(100 * spec.sm_shared_bytes // largest, 100)  # the device takes the next size above
            self._set(kernel, _Attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent)
        source = (self._folder / spec.file).read_text()
        # A kernel that waits for its predecessor itself (common.cuh) may be launched before the predecessor's end.
        waits = self.arch >= 90 and "wait_for_predecessor()" in source
        submit = self._submit_to(kernel, spec.shared_bytes, begins_early=waits)
        return make_launcher(spec.name, parse_signature(source, spec.name, spec.macros), submit)

    def _submit_to(self, kernel: Any, shared_bytes: int, *, begins_early: bool) -> Submit:
        """Return what launches a kernel on torch's current stream."""
        device_id, streams = self._device.device_id, self._streams
        current_stream = torch._C._cuda_getCurrentRawStream  # torch.cuda.current_stream() takes 4 us

        @lru_cache(_MAX_CONFIGS)  # making one takes as long as converting ten arguments
        def config(grid: tuple[int, ...], block: int, cluster: int, early: bool) -> LaunchConfig:
            return LaunchConfig(
                grid=grid,
                block=block,
                cluster=(cluster, 1, 1) if cluster > 1 else None,
                shmem_size=shared_bytes,
                programmatic_stream_serialization=early and begins_early,
            )

        def submit(grid: tuple[int, ...], block: int, cluster: int, early: bool, arguments: tuple[Any, ...]) -> None:
            handle = current_stream(device_id)
            stream = streams.get(handle)
            if stream is None:
                stream = streams[handle] = Stream.from_handle(handle)
            launch(stream, config(grid, block, cluster, early), kernel, *arguments)

        return submit

    def _set(self, kernel: Any, attribute: _Attribute, value: int) -> None:
        (error,) = driver.cuKernelSetAttribute(attribute, value, kernel.handle, self._device.device_id)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{attribute.name} cannot be {value}: {error.name}")

    def _compile(self, file: str, macros: Macros) -> ObjectCode:
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


def _module_key(spec: KernelSpec) -> _ModuleKey:
    """Return what kernels of one loaded module share: attributes are a loaded kernel's, so other ones need a copy."""
    return spec.file, frozenset(spec.macros.items()), spec.shared_bytes, spec.sm_shared_bytes


def tensor_map(tensor: Tensor, *box: int) -> TensorMapDescriptor:
    """Create the TMA descriptor of a tensor of 8 or 16-bit values, which is copied in boxes of this shape."""
    bits = torch.uint8 if tensor.itemsize == 1 else torch.uint16
    view = StridedMemoryView.from_any_interface(tensor.view(bits), stream_ptr=-1)
    return view.as_tensor_map(box, swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=TensorMapL2Promotion.L2_256B)

"""Compiles csrc/ at start with NVRTC, through NVIDIA's cuda-core: no toolkit, no headers, milliseconds a file.

A kernel of these is launched on torch's current stream and so is captured by torch's CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

import minisgl

SCALAR_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


class Kernel:
    """One compiled kernel; calling it launches it on torch's current stream."""

    def __init__(self, kernel: Any, streams: dict[int, Stream]) -> None:
        self._kernel = kernel
        self._streams = streams  # by torch's handle, shared by all kernels of a compiler

    def __call__(self, grid: tuple[int, ...], block: int, *args: Any) -> None:
        """Arguments: tensors' data_ptr() for pointers, NumPy scalars of the exact type for the rest."""
        handle = torch.cuda.current_stream().cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = Stream.from_handle(handle)
        launch(stream, LaunchConfig(grid=grid, block=block), self._kernel, *args)


class Compiler:
    """Compiles files of csrc/ for one device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = Device(device.index or 0)
        self._device.set_current()
        self._streams: dict[int, Stream] = {}
        self._folder = Path(minisgl.__file__).parent / "csrc"

    def compile(self, file: str, kernels: tuple[str, ...], **macros: str | int) -> list[Kernel]:
        """The named kernels of one file, with these macros defined."""
        options = ProgramOptions(
            std="c++17",
            arch=f"sm_{self._device.arch}",
            include_path=[str(self._folder)],
            define_macro=[(name, str(value)) for name, value in macros.items()],
        )
        source = (self._folder / file).read_text()
        module = Program(source, code_type="c++", options=options).compile("cubin")
        return [Kernel(module.get_kernel(name), self._streams) for name in kernels]

"""Compiles csrc/ at start with NVRTC, through NVIDIA's cuda-core: no toolkit, no headers, milliseconds a file.

A kernel of these is launched on torch's current stream and so is captured by torch's CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

import minisgl

SCALAR_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


class TorchStream:
    """Torch's current stream as cuda-core takes it (the __cuda_stream__ protocol)."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


class Kernel:
    """One compiled kernel; calling it launches it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = TorchStream()

    def __call__(self, grid: tuple[int, ...], block: int, *args: Any) -> None:
        """Arguments: tensors' data_ptr() for pointers, NumPy scalars or ctypes values of the exact type for the rest."""
        launch(self._stream, LaunchConfig(grid=grid, block=block), self._kernel, *args)


class Compiler:
    """Compiles files of csrc/ for one device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = Device(device.index or 0)
        self._device.set_current()
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
        return [Kernel(module.get_kernel(name)) for name in kernels]

"""Typed launches: a kernel's arguments are keywords with the names and types of its declaration in csrc/.

    extern "C" __global__ void rms_norm(const T* x, const W* weight, T* out, int H, float eps)

is launched by `rms_norm((rows,), 128, x=x, weight=norm.weight, out=out, H=1024, eps=1e-6)`: tensors for pointers,
Python numbers for the rest. The declaration is parsed once, when the kernel is compiled. Before anything is launched, a
TypeError names the kernel and an argument that is missing or unknown, a tensor of another dtype than the pointer's, a
number that the type cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

SCALAR_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3",  # in the KV cache only (fp8.cuh)
}
VECTOR_BYTES = 16  # of csrc's Vec, the most that a thread loads or stores at once
# Most rows of a step whose kernels begin before their predecessors end (programmatic dependent launch). With more rows
# cuBLAS multiplies, whose kernels neither begin early nor let their successors begin early; if only the kernels between
# them do, a step takes 0.6% longer.
MAX_EARLY_ROWS = 64
# Shared memory of a multiprocessor, out of 256 KiB, while it computes the product before attention. The rest is L1,
# through which attention, which begins early, streams K and V. The hardware supports only certain sizes; this is one.
SHARED_BEFORE_ATTENTION = 132 << 10

_SCALARS = {name: dtype for dtype, name in SCALAR_NAMES.items()}
_POINTED = {
    "float": torch.float32,
    "int": torch.int32,
    "unsigned": torch.int32,  # torch has few operations on uint32, so bit masks are int32
    "long long": torch.int64,
    "bool": torch.bool,
}
_NUMBERS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "int": (np.int32, (int, np.integer)),
    "long long": (np.int64, (int, np.integer)),
    "float": (np.float32, (int, float, np.integer, np.floating)),
}
_MAX_NUMBERS = 4096  # converted numbers of a type that are kept

Macros: TypeAlias = Mapping[str, str | int]
Launcher: TypeAlias = Callable[..., None]
"""launch(grid, block, *, cluster=1, early=True, **arguments). The grid counts blocks, or clusters of `cluster` blocks
along its first axis; the block counts threads. Without `early` the kernel waits for its predecessor's end (common.cuh).
"""
Submit: TypeAlias = Callable[[tuple[int, ...], int, int, bool, tuple[Any, ...]], None]
"""Passes grid, block, cluster, early and the converted arguments to the driver."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel of csrc/ and what it is compiled with."""

    file: str
    name: str
    macros: Macros = field(default_factory=dict)
    shared_bytes: int = 0  # dynamic shared memory of a block
    # Shared memory of a multiprocessor while it runs the kernel; a size that the hardware supports. The rest is L1,
    # also for kernels that begin meanwhile. 0: the driver chooses enough for as many blocks as fit.
    sm_shared_bytes: int = 0


class Parameter(NamedTuple):
    """A parameter of a kernel."""

    name: str
    type: str  # "pointer", "int", "long long", "float" or "struct", which is passed as it is
    dtype: torch.dtype | None = None  # a pointer's values; None: any, for pointers to structs
    optional: bool = False  # OPTIONAL in the source: None is passed as a null pointer

    def fault(self, value: object) -> str | None:
        """Describe the error in an argument, or return None."""
        if self.type in _NUMBERS:
            try:
                _Numbers(self.type)[value]
            except (TypeError, OverflowError) as error:
                return str(error)
        elif self.type == "pointer":
            if value is None:
                return None if self.optional else "is None, but the kernel reads or writes it"
            if not isinstance(value, Tensor):
                return f"is {value!r}, not a tensor"
            if self.dtype not in (None, value.dtype):
                return f"is of {value.dtype}, not {self.dtype}"
        return None


def parse_signature(source: str, kernel: str, macros: Macros) -> tuple[Parameter, ...]:
    """Return the parameters of a kernel that `source` declares.

    `macros` define T, W (common.cuh), C (fp8.cuh) and L (moe.cuh).
    """
    found = re.search(rf'extern "C" __global__ void[^;{{]*?\b{kernel}\(([^)]*)\)', source)
    if found is None:
        raise ValueError(f'no extern "C" __global__ void {kernel} in this source')
    scalar = macros.get("SCALAR")
    pointed = dict(_POINTED)
    aliases = {"T": "SCALAR", "W": "NORM_SCALAR", "C": "CACHE", "L": "LOGIT_SCALAR"}
    for alias, macro in aliases.items():
        name = macros.get(macro, scalar)
        if name is not None:
            pointed[alias] = _SCALARS[str(name)]
    return tuple(_parameter(kernel, text, pointed) for text in found[1].split(","))


def _parameter(kernel: str, text: str, pointed: Mapping[str, torch.dtype]) -> Parameter:
    *words, name = text.replace("*", " * ").split()
    kind = " ".join(word for word in words if word not in ("const", "OPTIONAL"))
    if kind.endswith(" *"):
        return Parameter(name, "pointer", pointed.get(kind.removesuffix(" *")), "OPTIONAL" in words)
    if kind.startswith("__grid_constant__ "):
        return Parameter(name, "struct")
    if kind not in _NUMBERS:
        raise ValueError(f"{kernel}: {name} is of type {kind!r}, which no launch can pass")
    return Parameter(name, kind)


def make_launcher(kernel: str, parameters: Sequence[Parameter], submit: Submit) -> Launcher:
    """Return the function that launches a kernel; it raises TypeError for a wrong argument, which it names.

    The function is generated for these parameters, so that each argument costs only its own conversion: in eager steps
    the host's time for a launch matters.
    """

    def wrong(arguments: Sequence[object], error: Exception) -> Exception:
        for parameter, value in zip(parameters, arguments, strict=True):
            fault = parameter.fault(value)
            if fault is not None:
                return TypeError(f"{kernel}: {parameter.name} {fault}")
        return error

    def refuse() -> int:
        raise TypeError

    names = ", ".join(parameter.name for parameter in parameters)
    code = f"""
def {kernel}(grid, block, /, *, cluster=1, early=True, {names}):
    try:
        arguments = ({", ".join(map(_conversion, parameters))},)
    except Exception as error:
        raise wrong(({names},), error) from None
    submit(grid, block, cluster, early, arguments)
"""
    scope: dict[str, Any] = {"submit": submit, "wrong": wrong, "refuse": refuse}
    scope |= {f"dtype_of_{each.name}": each.dtype for each in parameters}
    scope |= {kind.replace(" ", "_"): _Numbers(kind) for kind in _NUMBERS}
    exec(code, scope)
    launcher: Launcher = scope[kernel]
    return launcher


def _conversion(parameter: Parameter) -> str:
    """Return the source of an expression that converts an argument for the driver; it raises for a wrong one."""
    name = parameter.name
    if parameter.type == "struct":
        return name
    if parameter.type in _NUMBERS:
        return f"{parameter.type.replace(' ', '_')}[{name}]"
    address = f"{name}.data_ptr()"
    if parameter.dtype is not None:
        address += f" if {name}.dtype is dtype_of_{name} else refuse()"
    return f"0 if {name} is None else {address}" if parameter.optional else address


class _Numbers(dict[Any, Any]):
    """Python numbers as NumPy scalars of one type; a second look-up is three times as fast as making one.

    Equal numbers are one key, so -0.0 may become 0.0.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._scalar, self._accepted = _NUMBERS[kind]

    def __missing__(self, value: object) -> np.generic:
        if not isinstance(value, self._accepted):
            raise TypeError(f"is {value!r}, not a number of type {self._kind}")
        try:
            converted = self._scalar(value)
        except OverflowError:
            raise OverflowError(f"is {value}, beyond what a number of type {self._kind} holds") from None
        if len(self) >= _MAX_NUMBERS:
            self.clear()
        self[value] = converted
        return converted  # type: ignore[no-any-return]

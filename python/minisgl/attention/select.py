"""Which attention an engine uses: one for decodes, one for everything else, often the same.

A `Candidate` says whether a backend can run a model on a GPU. `preferences` is the order in which `auto`
tries them, by what docs/performance.md shows; what is not measured there goes by the hardware's capability.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from minisgl.attention.base import AttentionBackend, AttentionShape
from minisgl.attention.cpu_backend import CpuAttention
from minisgl.attention.division import fused_decode_missing
from minisgl.attention.pair import PairAttention
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import ConfigError, attention_names

if TYPE_CHECKING:
    from minisgl.attention.fused import FusedDecode

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
Capability = tuple[int, int]

SIXTEEN_BITS = torch.bfloat16, torch.float16
TESTED: tuple[Capability, ...] = ((9, 0),)
FP8: Capability = (8, 9)  # from here on GPUs convert 8 bits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may be chosen."""

    title: str
    missing: Callable[[AttentionShape, Capability], str | None]  # why it cannot run here
    ready: Callable[[AttentionShape, Capability, Role], bool]  # without compiling anything for minutes


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """What attends in an engine."""

    backend: AttentionBackend
    fused: FusedDecode | None = None  # in captured decodes, in the backend's place

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph may hold any decode."""
        return self.fused is not None or self.backend.graph_safe

    def widened(self, shape: AttentionShape) -> torch.dtype | None:
        """Of the one layer that the KV pool has to have room for besides its own, if it has to."""
        return shape.dtype if self.backend.widens else None


def preferences(role: Role, shape: AttentionShape, capability: Capability) -> tuple[str, ...]:
    """The backends' names, the fastest first."""
    if capability[0] >= 10:
        return ("fused", "fi", "torch") if role == "decode" else ("fi", "torch")
    if role == "prefill":
        return "fa", "fi", "torch"
    return ("fused", "fi", "fa", "torch") if shape.group <= 2 else ("fused", "fa", "fi", "torch")


def make_attention(name: str, shape: AttentionShape, device: torch.device) -> ChosenAttention:
    """The backend or pair that --attn names; where one cannot run, the next best, which is said in the log."""
    if device.type == "cpu":
        if name not in ("auto", "torch"):
            logger.info("--attn %s is for GPUs; on the CPU attention runs in torch", name)
        return ChosenAttention(CpuAttention(shape.page_size, shape.dtype))
    capability = torch.cuda.get_device_capability(device)
    if shape.fp8_kv and capability < FP8:
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability {FP8[0]}.{FP8[1]} or later, "
            f"not {capability[0]}.{capability[1]}"
        )
    asked = attention_names(name)
    prefill = choose(asked[0], "prefill", shape, capability, CANDIDATES)
    decode = choose(asked[1], "decode", shape, capability, CANDIDATES)
    if capability not in TESTED:
        logger.warning("attention is not tested on GPUs of compute capability %d.%d", *capability)
    logger.info("attention: %s", prefill if prefill == decode else f"{prefill} for prefill, {decode} for decode")
    backend = make_backend(prefill, shape, device)
    if decode == "fused":
        from minisgl.attention.fused import FusedDecode

        return ChosenAttention(backend, FusedDecode(shape, device))
    return ChosenAttention(
        backend if decode == prefill else PairAttention(backend, make_backend(decode, shape, device))
    )


def make_backend(name: str, shape: AttentionShape, device: torch.device) -> AttentionBackend:
    """One that can run here."""
    match name:
        case "fa":
            from minisgl.attention.fa import FlashAttention3

            return FlashAttention3(shape, device)
        case "fi":
            from minisgl.attention.fi import FlashInfer

            capability = torch.cuda.get_device_capability(device)
            roles: tuple[Role, ...] = ("prefill", "decode")
            if not all(_fi_ready(shape, capability, role) for role in roles):
                logger.info("FlashInfer compiles its kernels at their first use: up to a minute each, once")
            return FlashInfer(shape, device)
        case _:
            return TorchAttention(shape.page_size)


def choose(
    asked: str, role: Role, shape: AttentionShape, capability: Capability, candidates: Mapping[str, Candidate]
) -> str:
    """The name of the backend for this role: the one asked for, or by `preferences` the first that runs (and for
    `auto` is ready).
    """
    order = tuple(name for name in preferences(role, shape, capability) if name in candidates)
    if asked != "auto":
        why = candidates[asked].missing(shape, capability)
        if why is None:
            return asked
        order = tuple(name for name in order if name != asked)
        logger.warning("--attn %s cannot be used: %s", asked, why)
    for name in order:
        candidate = candidates[name]
        why = candidate.missing(shape, capability)
        if why is None and not candidate.ready(shape, capability, role):
            why = f"it would first be compiled, which takes a minute or more: --attn {name} does that"
        if why is None:
            if name == "torch":
                logger.warning("attention runs in torch, which is slow")
            return name
        logger.info("%s attention would be faster with %s: %s", role, candidate.title, why)
    raise AssertionError("torch always runs")


def _fa_missing(shape: AttentionShape, capability: Capability) -> str | None:
    if capability[0] not in (8, 9):
        return f"it is built for compute capability 8.x and 9.0, not {capability[0]}.{capability[1]}"
    why = _unsupported(shape, head_dims=range(16, 257, 16) if shape.fp8_kv else range(8, 257, 8))
    if why is None and shape.fp8_kv:  # whose pages a kernel of ours widens
        why = import_error("cuda.core", "cuda-core", "cuda")
    return why or import_error("sgl_kernel.flash_attn", "sglang-kernel", "cuda")


def _fi_missing(shape: AttentionShape, capability: Capability) -> str | None:
    if capability < (8, 0):
        return f"it needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    if shape.fp8_kv:
        return "it does not read a KV cache in 8 bits (--kv-cache-dtype fp8_e4m3)"
    why = _unsupported(shape, head_dims=(64, 128, 256))
    why = why or import_error("flashinfer.decode", "flashinfer-python", "fi")
    if why is None and not _has_nvcc():
        roles: tuple[Role, ...] = ("prefill", "decode")
        if not all(_fi_ready(shape, capability, role) for role in roles):
            return "its kernels are not compiled, and there is no CUDA toolkit (nvcc) to do it"
    return why


def import_error(module: str, package: str, extra: str) -> str | None:
    """Why a module of an optional package cannot be imported, in one line, or None."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return f"the package {package} is not installed (pip install 'minisgl[{extra}]')"
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package built for another torch or driver raises
        return f"the package {package} does not load: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def _unsupported(shape: AttentionShape, head_dims: range | tuple[int, ...]) -> str | None:
    if shape.dtype not in SIXTEEN_BITS:
        return f"it is for bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in head_dims:
        return f"it has no kernels for heads of {shape.head_dim}"
    return None


def _fi_ready(shape: AttentionShape, capability: Capability, role: Role) -> bool:
    from minisgl.attention.fi import modules

    return all(path.exists() for path in modules(shape, capability, decode=role == "decode"))


def _fused_missing(shape: AttentionShape, capability: Capability) -> str | None:
    return import_error("cuda.core", "cuda-core", "cuda") or fused_decode_missing(shape, capability)


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()


def _always(*_: object) -> bool:
    return True


CANDIDATES: Mapping[str, Candidate] = {
    "fused": Candidate("the fused decode kernel (fused)", _fused_missing, _always),
    "fa": Candidate("FlashAttention 3 (fa)", _fa_missing, _always),
    "fi": Candidate("FlashInfer (fi)", _fi_missing, _fi_ready),
    "torch": Candidate("torch", lambda *_: None, _always),
}

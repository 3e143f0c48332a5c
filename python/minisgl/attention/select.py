"""Which attention an engine uses: one for decodes, one for everything else, often the same.

A `Candidate` says whether a backend can run a model on a GPU. `preferences` is the order in which `auto`
tries them, by what docs/performance.md shows; what is not measured there goes by the hardware's capability.
The choice must then compute a small step rightly (`trial`), or the next best is tried.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minisgl.attention.base import AttentionBackend, AttentionShape
from minisgl.attention.cpu_backend import CpuAttention
from minisgl.attention.division import fused_decode_missing
from minisgl.attention.pair import PairAttention
from minisgl.attention.toolkit import provide_cuda_home
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.trial import Role, trial_error
from minisgl.attention.varlen import VarlenAttention
from minisgl.config import ConfigError, attention_names
from minisgl.kernel.select import import_error

if TYPE_CHECKING:
    from minisgl.attention.fused import FusedDecode

logger = logging.getLogger(__name__)

Capability = tuple[int, int]

SIXTEEN_BITS = torch.bfloat16, torch.float16
TESTED: tuple[Capability, ...] = ((9, 0),)
FP8: Capability = (8, 9)  # from here on GPUs convert 8 bits
MAX_SCORES = 1 << 22  # a head's, that torch may store at a time on a GPU: 0.5 GiB of 32 heads in float32


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
        return ("fused", "fi", "varlen", "torch") if role == "decode" else ("fi", "varlen", "torch")
    if role == "prefill":
        return "fa", "fi", "varlen", "torch"
    return ("fused", *(("fi", "fa") if shape.group <= 2 else ("fa", "fi")), "varlen", "torch")


def make_attention(name: str, shape: AttentionShape, device: torch.device) -> ChosenAttention:
    """The backend or pair that --attn names; where one cannot run, the next best, which is said in the log."""
    if device.type == "cpu":
        if name not in ("auto", "torch"):
            logger.info("--attn %s is for GPUs; on the CPU attention runs in torch", name)
        return ChosenAttention(CpuAttention(shape.page_size, shape.dtype, shape.scale))
    capability = torch.cuda.get_device_capability(device)
    if shape.fp8_kv and capability < FP8:
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability {FP8[0]}.{FP8[1]} or later, "
            f"not {capability[0]}.{capability[1]}"
        )
    asked = attention_names(name)
    prefill, backend = _choose_working(asked[0], "prefill", shape, device, capability)
    decode, decode_backend = _choose_working(asked[1], "decode", shape, device, capability)
    if capability not in TESTED:
        logger.warning("attention is not tested on GPUs of compute capability %d.%d", *capability)
    logger.info("attention: %s", prefill if prefill == decode else f"{prefill} for prefill, {decode} for decode")
    if decode == "fused":
        from minisgl.attention.fused import FusedDecode

        return ChosenAttention(backend, FusedDecode(shape, device))
    return ChosenAttention(backend if decode == prefill else PairAttention(backend, decode_backend))


def _choose_working(
    asked: str, role: Role, shape: AttentionShape, device: torch.device, capability: Capability
) -> tuple[str, AttentionBackend]:
    """The first choice that computes a small step rightly: its name, and the backend unless it is `fused`."""
    candidates = dict(CANDIDATES)
    while True:
        name = choose(asked, role, shape, capability, candidates)
        backend = make_backend(name, shape, device)
        why = None if name in ("torch", "fused") else trial_error(backend, shape, device, role)
        if why is None:
            return name, backend
        candidates[name] = dataclasses.replace(candidates[name], missing=lambda *_, why=why: why)


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
        case "varlen":
            return VarlenAttention(shape.page_size, shape.scale)
        case _:
            return TorchAttention(shape.page_size, MAX_SCORES, shape.scale)


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
    if capability[0] == 8 and shape.windowed:  # github.com/sgl-project/sgl-flash-attn, pull request 50
        return "on compute capability 8.x it was seen to read wrong keys where a window slides (sgl-flash-attn#50)"
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
    if why is not None:
        return why
    toolkit = provide_cuda_home()
    why = import_error("flashinfer.decode", "flashinfer-python", "cuda")
    if why is None and toolkit is None:
        roles: tuple[Role, ...] = ("prefill", "decode")
        if not all(_fi_ready(shape, capability, role) for role in roles):
            return (
                "its kernels are not compiled, and there is no CUDA toolkit (nvcc) to do it "
                "(pip install nvidia-cuda-nvcc)"
            )
    return why


def _varlen_missing(shape: AttentionShape, capability: Capability) -> str | None:
    if capability < (8, 0):
        return f"it needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    return _unsupported(shape, head_dims=range(8, 257, 8))


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


def _always(*_: object) -> bool:
    return True


CANDIDATES: Mapping[str, Candidate] = {
    "fused": Candidate("the fused decode kernel (fused)", _fused_missing, _always),
    "fa": Candidate("FlashAttention 3 (fa)", _fa_missing, _always),
    "fi": Candidate("FlashInfer (fi)", _fi_missing, _fi_ready),
    "varlen": Candidate("torch's FlashAttention 2 (varlen)", _varlen_missing, _always),
    "torch": Candidate("torch", lambda *_: None, _always),
}

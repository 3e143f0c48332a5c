"""Choice of each layer's attention backends: one for decodes, one for everything else, often the same.

A `Candidate` tells, from a layer's spec, if a backend can run the layer on a GPU. `preferences` is the order in which
`auto` tries the backends. It follows the measurements of docs/performance.md, and for GPUs that were not measured the
compute capability. The chosen backend must then compute a small step correctly (`self_test`). One rule holds
everywhere: a layer that a backend does not support runs on the next best backend, and the log says so once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl.attention.backends.cpu_backend import CpuAttention
from minisgl.attention.backends.cuda_home import provide_cuda_home
from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.backends.varlen import VarlenAttention
from minisgl.attention.base import AttentionBackend, AttentionSpec, LayerSpec
from minisgl.attention.model_attention import LayerAttention, ModelAttention
from minisgl.attention.self_test import ROLES, Role, self_test_error
from minisgl.config import ConfigError
from minisgl.config.engine import attention_names
from minisgl.optional_packages import import_error

if TYPE_CHECKING:
    from minisgl.attention.fused import FusedDecode

logger = logging.getLogger(__name__)

Capability = tuple[int, int]
Unsupported = Callable[[AttentionSpec, Capability], str | None]
"""Says why a backend cannot run a layer on a GPU; None if it can."""

SIXTEEN_BITS = torch.bfloat16, torch.float16
TESTED: tuple[Capability, ...] = ((9, 0),)
FP8: Capability = (8, 9)  # the first GPUs that convert FP8 in hardware
MAX_GROUP = 8  # query heads of a KV head in fused decode: columns of a tensor-core instruction
MAX_SCORES = 1 << 22  # scores of a head that torch may store at a time on a GPU: 0.5 GiB for 32 heads in float32


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may be chosen for a layer."""

    title: str
    unsupported: Unsupported
    make: Callable[[AttentionSpec, torch.device], AttentionBackend] | None  # None: fused decode, which is no backend
    ready: Callable[[AttentionSpec, Capability, Role], bool] = lambda *_: True  # without compiling for minutes


def preferences(role: Role, spec: AttentionSpec, capability: Capability) -> tuple[str, ...]:
    """Return the backends' names, the fastest first."""
    if spec.latent is not None:
        return "latent", "torch"
    if capability[0] >= 10:
        return ("fused", "fi", "varlen", "torch") if role == "decode" else ("fi", "varlen", "torch")
    if role == "prefill":
        return "fa", "fi", "varlen", "torch"
    return ("fused", *(("fi", "fa") if spec.group <= 2 else ("fa", "fi")), "varlen", "torch")


def make_attention(
    name: str, layers: Sequence[LayerSpec], device: torch.device, *, window_group: bool = False
) -> ModelAttention:
    """Return the layers' backends: the backends that --attn names if they support the layer, else the next best.

    `window_group` as in ModelAttention.
    Raises ConfigError where the GPU cannot read the pool.
    """
    attending = [spec for spec in layers if isinstance(spec, AttentionSpec)]
    chosen = _choose_on_cpu(name, attending) if device.type == "cpu" else _choose_on_gpu(name, attending, device)
    return ModelAttention(
        [chosen[spec] if isinstance(spec, AttentionSpec) else spec for spec in layers], window_group=window_group
    )


def _choose_on_cpu(name: str, attending: Sequence[AttentionSpec]) -> Mapping[AttentionSpec, LayerAttention]:
    if name not in ("auto", "torch"):
        logger.info("--attn %s is for GPUs; on the CPU attention runs in torch", name)
    backends = {spec: CpuAttention(spec) for spec in dict.fromkeys(attending)}
    return {spec: LayerAttention("torch", spec, backend, backend) for spec, backend in backends.items()}


def _choose_on_gpu(
    name: str, attending: Sequence[AttentionSpec], device: torch.device
) -> Mapping[AttentionSpec, LayerAttention]:
    """Return the backends of each spec, and log how many layers have which."""
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8 and any(spec.fp8_kv for spec in attending):
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability {FP8[0]}.{FP8[1]} or later, "
            f"not {capability[0]}.{capability[1]}"
        )
    chooser = Chooser(CANDIDATES, capability)
    for_prefill, for_decode = attention_names(name)
    names = {
        spec: (
            chooser.choose_working(for_prefill, "prefill", spec, device),
            chooser.choose_working(for_decode, "decode", spec, device),
        )
        for spec in dict.fromkeys(attending)
    }
    fused_specs = [spec for spec, (_, decode) in names.items() if decode == "fused"]
    fused = _make_fused(fused_specs, device) if fused_specs else None
    chosen = {spec: _make_layer(spec, prefill, decode, fused, device) for spec, (prefill, decode) in names.items()}
    if capability not in TESTED:
        logger.warning("attention is not tested on GPUs of compute capability %d.%d", *capability)
    titles = Counter(chosen[spec].title for spec in attending)
    for title, count in titles.items():
        logger.info("attention%s: %s", f" of {count} layers" if len(titles) > 1 else "", title)
    return chosen


def _make_layer(
    spec: AttentionSpec, prefill: str, decode: str, fused: FusedDecode | None, device: torch.device
) -> LayerAttention:
    """Make a layer's backends. Decodes that `fused` runs when captured have the backend of prefills when not."""
    backend = make_backend(prefill, spec, device)
    if decode == prefill:
        return LayerAttention(prefill, spec, backend, backend)
    title = f"{prefill} for prefill, {decode} for decode"
    if decode == "fused":
        return LayerAttention(title, spec, backend, backend, fused)
    return LayerAttention(title, spec, backend, make_backend(decode, spec, device))


def make_backend(name: str, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    """Return a backend that can run here; ValueError for `fused`, which is none."""
    make = CANDIDATES[name].make
    if make is None:
        raise ValueError(f"{name} is not a backend")
    return make(spec, device)


class Chooser:
    """Chooses backends on one GPU; logs each reason once, though several specs may give it."""

    def __init__(self, candidates: Mapping[str, Candidate], capability: Capability) -> None:
        self._candidates = candidates
        self._capability = capability
        self._logged: set[str] = set()

    def choose_working(self, asked: str, role: Role, spec: AttentionSpec, device: torch.device) -> str:
        """Return the first choice that computes a small step correctly; `fused` and `torch` are not tested."""
        failed: dict[str, str] = {}
        while True:
            name = self.choose(asked, role, spec, failed)
            if name in ("torch", "fused"):
                return name
            why = self_test_error(partial(make_backend, name, device=device), spec, device, role)
            if why is None:
                return name
            failed[name] = why

    def choose(self, asked: str, role: Role, spec: AttentionSpec, failed: Mapping[str, str] = {}) -> str:
        """Return the backend for this role: the one asked for, or by `preferences` the first that supports the spec.

        With `auto` it must also be ready. `failed`: backends that failed their self-test, and why.
        """
        order = preferences(role, spec, self._capability)
        if asked != "auto":
            why = self._unsupported(asked, spec, failed)
            if why is None:
                return asked
            order = tuple(name for name in order if name != asked)
            self._log(logging.WARNING, f"--attn {asked} cannot be used: {why}")
        for name in order:
            candidate = self._candidates[name]
            why = self._unsupported(name, spec, failed)
            if why is None and not candidate.ready(spec, self._capability, role):
                why = f"it would first be compiled, which takes a minute or more: --attn {name} does that"
            if why is None:
                if name == "torch":
                    self._log(logging.WARNING, "attention runs in torch, which is slow")
                return name
            self._log(logging.INFO, f"{role} attention would be faster with {candidate.title}: {why}")
        raise ValueError("torch must be the last preference: it supports every layer")

    def _unsupported(self, name: str, spec: AttentionSpec, failed: Mapping[str, str]) -> str | None:
        return failed.get(name) or self._candidates[name].unsupported(spec, self._capability)

    def _log(self, level: int, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.log(level, "%s", line)


def _fa_unsupported(spec: AttentionSpec, capability: Capability) -> str | None:
    if capability[0] not in (8, 9):
        return f"it is built for compute capability 8.x and 9.0, not {capability[0]}.{capability[1]}"
    if capability[0] == 8 and spec.window is not None:  # github.com/sgl-project/sgl-flash-attn, pull request 50
        return "on compute capability 8.x it was seen to read wrong keys where a window slides (sgl-flash-attn#50)"
    if spec.has_sinks and spec.dtype != torch.bfloat16:
        return "it takes attention sinks in bfloat16 alone"
    why = _unsupported(spec, head_dims=range(16, 257, 16) if spec.fp8_kv else range(8, 257, 8))
    if why is None and spec.fp8_kv:  # upcast by the kernels of csrc/
        why = import_error("cuda.core", "cuda-core")
    return why or import_error("sgl_kernel.flash_attn", "sglang-kernel")


def _fi_unsupported(spec: AttentionSpec, capability: Capability) -> str | None:
    if capability < (8, 0):
        return f"it needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    if spec.fp8_kv:
        return "it does not read a KV cache in 8 bits (--kv-cache-dtype fp8_e4m3)"
    why = _unsupported(spec, head_dims=(64, 128, 256))
    if why is not None:
        return why
    toolkit = provide_cuda_home()
    why = import_error("flashinfer.decode", "flashinfer-python")
    if why is None and toolkit is None and not all(_fi_ready(spec, capability, role) for role in ROLES):
        return (
            "its kernels are not compiled, and there is no CUDA toolkit (nvcc) to do it (pip install nvidia-cuda-nvcc)"
        )
    return why


def _varlen_unsupported(spec: AttentionSpec, capability: Capability) -> str | None:
    if capability < (8, 0):
        return f"it needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    return _unsupported(spec, head_dims=range(8, 257, 8))


def _unsupported(spec: AttentionSpec, head_dims: range | tuple[int, ...]) -> str | None:
    if spec.dtype not in SIXTEEN_BITS:
        return f"it is for bfloat16 and float16, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.latent is not None:
        return "it has no latent attention here"
    if spec.head_dim not in head_dims:
        return f"it has no kernels for heads of {spec.head_dim}"
    return None


def _fi_ready(spec: AttentionSpec, capability: Capability, role: Role) -> bool:
    from minisgl.attention.backends.fi import module_path

    return module_path(spec, capability, decode=role == "decode").exists()


def fused_unsupported(spec: AttentionSpec, capability: Capability) -> str | None:
    """Return why csrc/decode_attention.cu cannot run a layer on this GPU, or None."""
    if spec.has_sinks and not spec.stores_kv:
        return "it counts sinks beside a new token, which a layer that shares K and V of another does not have"
    if capability < (9, 0):
        return "it needs thread block clusters (compute capability 9.0)"
    if spec.dtype not in SIXTEEN_BITS:
        return "it is for bfloat16 and float16"
    if spec.head_dim not in (64, 128, 256, 512):
        return f"it is for heads of 64, 128, 256 or 512 dimensions, not {spec.head_dim}"
    if spec.num_heads % spec.num_kv_heads or spec.group > MAX_GROUP:
        return f"it is for up to {MAX_GROUP} query heads a KV head, not {spec.group}"
    if spec.page_size & (spec.page_size - 1):
        return f"it is for pages of a power of two, not {spec.page_size}"
    return None


def latent_unsupported(spec: AttentionSpec, capability: Capability) -> str | None:
    """Return why the kernels for latents cannot run a layer on this GPU, or None."""
    if capability[0] not in (9, 10):
        return f"it needs a GPU of compute capability 9.0 or 10.x, not {capability[0]}.{capability[1]}"
    if spec.latent is None:
        return "it is for latent attention"
    if (spec.latent.rank, spec.latent.rope) != (512, 64):
        return f"it has kernels for latents of 512 + 64, not of {spec.latent.rank} + {spec.latent.rope}"
    if spec.fp8_kv:
        return "it does not read latents in 8 bits (--kv-cache-dtype fp8_e4m3)"
    if spec.dtype not in SIXTEEN_BITS:
        return f"it is for bfloat16 and float16, not {str(spec.dtype).removeprefix('torch.')}"
    return None


def _with_cuda_core(unsupported: Unsupported) -> Unsupported:
    """Return the rule of a backend whose kernels are those of csrc/, which cuda-core compiles and launches."""
    return lambda spec, capability: import_error("cuda.core", "cuda-core") or unsupported(spec, capability)


def _make_fa(spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    from minisgl.attention.backends.fa import FlashAttention3

    return FlashAttention3(spec, device)


def _make_fi(spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    from minisgl.attention.backends.fi import FlashInfer

    capability = torch.cuda.get_device_capability(device)
    if not all(_fi_ready(spec, capability, role) for role in ROLES):
        logger.info("FlashInfer compiles its kernels at their first use: up to a minute each, once")
    return FlashInfer(spec, device)


def _make_latent(spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    from minisgl.attention.latent.backend import LatentAttentionBackend

    return LatentAttentionBackend(spec, device)


def _make_fused(specs: Sequence[AttentionSpec], device: torch.device) -> FusedDecode:
    from minisgl.attention.fused import FusedDecode

    return FusedDecode(specs, device)


CANDIDATES: Mapping[str, Candidate] = {
    "fa": Candidate("FlashAttention 3 (fa)", _fa_unsupported, _make_fa),
    "fi": Candidate("FlashInfer (fi)", _fi_unsupported, _make_fi, _fi_ready),
    "varlen": Candidate(
        "torch's FlashAttention 2 (varlen)", _varlen_unsupported, lambda spec, _: VarlenAttention(spec)
    ),
    "latent": Candidate("the kernels for latents (latent)", _with_cuda_core(latent_unsupported), _make_latent),
    "fused": Candidate("the fused decode kernel (fused)", _with_cuda_core(fused_unsupported), make=None),
    "torch": Candidate("torch", lambda *_: None, lambda spec, _: TorchAttention(spec, MAX_SCORES)),
}

"""Findings about the parts that could serve a model on a device: each is tried with a small case, if it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from minisgl.attention.backend_choice import CANDIDATES, preferences
from minisgl.attention.base import AttentionSpec
from minisgl.attention.self_test import ROLES
from minisgl.doctor.cases import run_attention, run_experts, run_fused, run_int4, run_levels, run_ops, run_sampler
from minisgl.error_text import summary
from minisgl.kernel.availability import kernels_missing, make_ops
from minisgl.kernel.base import LatentDims
from minisgl.kernel.cpu.compile import CompilationError
from minisgl.kernel.cpu.int4 import load_int4_linear
from minisgl.quantization.levels import LevelFormat
from minisgl.quantization.rounding import INT4_FORMAT

TOLERANCE = 2e-2  # relative to the norm of a result in bf16
_LATENTS = AttentionSpec(  # DeepSeek-V2-Lite's
    16, 1, 576, 16, torch.bfloat16, scale=192**-0.5, latent=LatentDims(rank=512, rope=64, nope=128, value=128)
)
_EXPERT_FORMATS = (LevelFormat("fp8", 128), LevelFormat("int4", 128, zeros=True), LevelFormat("mxfp4", 32))
_FORMATS = (
    LevelFormat("fp8"),
    LevelFormat("fp8", 128),
    LevelFormat("int8"),
    LevelFormat("int4", 128, zeros=True),
    INT4_FORMAT,
)


class State(StrEnum):
    WORKS = "works"
    ABSENT = "absent"  # this machine lacks something that the part needs
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    part: str
    state: State
    remark: str = ""
    seconds: float = 0.0


def examine(device: torch.device) -> Iterator[Finding]:
    """Check all parts that could serve a model of the usual shape on this device."""
    dtype = torch.bfloat16
    shape = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, page_size=16, dtype=dtype)
    if device.type == "cuda":
        missing = kernels_missing(device)
        if missing is None:
            yield tried("kernels of csrc/: norm, rotation, products", lambda: run_ops(device, dtype))
            yield tried("kernels of csrc/: sampling", lambda: run_sampler(device))
        else:
            yield Finding("kernels of csrc/", State.ABSENT, f"they need {missing}")
        yield from _attention(shape, device)
    else:
        yield tried("operations of the CPU", lambda: run_ops(device, dtype))
        found = tried("products of few rows with int4 weights", lambda: run_int4(device, dtype))
        yield found if found.remark else replace(found, remark=_int4_kernel())
    yield tried("attention: torch", lambda: run_attention("torch", shape, device))
    backend, available = "shared memory", torch.distributed.is_available()
    if device.type == "cuda":
        backend, available = "nccl", available and torch.distributed.is_nccl_available()
    yield from _quantized(device, dtype)
    yield Finding(f"several ranks: {backend}", State.WORKS if available else State.ABSENT)


def _attention(usual: AttentionSpec, device: torch.device) -> Iterator[Finding]:
    capability = torch.cuda.get_device_capability(device)
    for name, candidate in CANDIDATES.items():
        if name == "torch":
            continue  # this part does not depend on the device
        shape = _LATENTS if name == "latent" else usual
        first = preferences("prefill", shape, capability)[0], preferences("decode", shape, capability)[0]
        part = f"attention: {name}"
        why = candidate.unsupported(shape, capability)
        if why is None and not all(candidate.ready(shape, capability, role) for role in ROLES):
            why = "its kernels are not compiled; the first use would do that, in a minute or more"
        if why is not None:
            yield Finding(part, State.ABSENT, why)
            continue
        run = run_fused if name == "fused" else run_attention
        found = tried(part, lambda run=run, name=name, shape=shape: run(name, shape, device))  # type: ignore[misc]
        preferred = [role for role, best in zip(ROLES, first, strict=True) if best == name]
        remark = f"first choice for {' and '.join(preferred)}" if preferred and not found.remark else found.remark
        yield Finding(part, found.state, remark, found.seconds)


def _quantized(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Report how quantized weights are multiplied, with a small case for each format that is not dequantized."""
    part = "weights of 8 and 4 bits"
    if device.type == "cpu":
        few = "; with --quantization int4 products of few rows read 4 bits"
        yield Finding(part, State.WORKS, f"dequantized to the model's dtype as they are loaded{few}")
        return
    ops = make_ops(device)
    for form in _EXPERT_FORMATS:
        if ops.keeps_experts(form, 768, 2048, dtype):
            part = f"experts of {form.kind}" + (f" in groups of {form.group}" if form.group else "")
            yield tried(part, lambda form=form: run_experts(ops, form, device, dtype))  # type: ignore[misc]
    kept = [form for form in _FORMATS if ops.keeps(form, 768, 2048, dtype)]
    if not kept:
        yield Finding(part, State.WORKS, "dequantized to the model's dtype as they are loaded")
    for form in kept:
        part = f"weights of {form.kind}" + (f" in groups of {form.group}" if form.group else "")
        yield tried(part, lambda form=form: run_levels(ops, form, device, dtype))  # type: ignore[misc]


def _int4_kernel() -> str:
    """Name the kernel of few rows with int4 weights on this CPU; if it is torch's, say why."""
    try:
        load_int4_linear()
    except CompilationError as error:
        return f"by torch's kernel, which is slower than csrc/int4_cpu.cpp: {error}"
    return "by csrc/int4_cpu.cpp"


def tried(part: str, case: Callable[[], tuple[Tensor, Tensor]]) -> Finding:
    """Run a case, which returns its result and the exact one, and report how it went."""
    begin = time.perf_counter()
    try:
        with torch.inference_mode(), _warnings_off():
            have, want = case()
            error = float((have.double() - want.double()).norm() / want.double().norm())
    except Exception as raised:  # a broken installation may raise anything, which is the finding
        return Finding(part, State.FAILS, summary(raised), time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    if not error < TOLERANCE:  # NaN is refused, too
        return Finding(part, State.FAILS, f"it computes something else (relative error {error:.1e})", seconds)
    return Finding(part, State.WORKS, "", seconds)


@contextmanager
def _warnings_off() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def verdict(findings: list[Finding], device: torch.device) -> str | None:
    """Return one line that says why the default path does not work on this device, or None."""
    failed = [finding.part for finding in findings if finding.state is State.FAILS]
    if failed:
        return f"{', '.join(failed)}: installed, but it does not work"
    if device.type == "cuda":
        states = {finding.part: finding.state for finding in findings}
        if states.get("kernels of csrc/") is State.ABSENT:
            return "without the kernels of csrc/ steps run in plain torch, which is slow"
        if all(states.get(f"attention: {name}") is not State.WORKS for name in ("fa", "fi", "varlen")):
            return "no fast attention for prefill: it would run in torch"
    return None

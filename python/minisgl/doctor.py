"""`minisgl doctor`: the installed packages, the parts that work on this machine, and the reasons why others do not.

Each check runs a small case of a part and compares it with plain torch. The exit code is 0 if the default path works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from minisgl.attention.backend_choice import CANDIDATES, TESTED, make_backend, preferences
from minisgl.attention.base import AttentionSpec
from minisgl.attention.self_test import ROLES, AttentionTest
from minisgl.config import ConfigError, EngineConfig
from minisgl.config.settings import add_flags, read_flags
from minisgl.engine.device import resolve_device
from minisgl.engine.sampler import TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.availability import kernels_missing, make_ops
from minisgl.kernel.base import Heads, Mixture, Norm, Ops, Routing
from minisgl.kernel.cpu_compile import CompilationError
from minisgl.kernel.cpu_int4 import load_int4_linear
from minisgl.kernel.torch_ops import TorchOps
from minisgl.optional_packages import one_line
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.random_levels import random_levels
from minisgl.quantization.rounding import INT4_FORMAT, round_to_int4
from minisgl.sampling_params import SamplingFlags
from minisgl.tables import Color, colored, table

PACKAGES = {
    "minisgl": "",
    "torch": "",
    "transformers": "",
    "sglang-kernel": "attention fa",
    "flashinfer-python": "attention fi",
    "cuda-core": "kernels of csrc/",
    "cuda-bindings": "kernels of csrc/",
    "nvidia-cuda-nvrtc": "kernels of csrc/",
}
DRIVER_FILE = Path("/proc/driver/nvidia/version")
TOLERANCE = 2e-2  # relative to the norm of a result in bf16
_LATENTS = AttentionSpec(  # DeepSeek-V2-Lite's
    16, 1, 576, 16, torch.bfloat16, scale=192**-0.5, latent_dim=512, expanded_dims=(128, 128)
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


COLORS: dict[State, Color] = {State.WORKS: "green", State.ABSENT: "yellow", State.FAILS: "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    part: str
    state: State
    remark: str = ""
    seconds: float = 0.0


def main(argv: Sequence[str]) -> int:
    """Examine this machine and print the findings."""
    parser = argparse.ArgumentParser(
        prog="minisgl doctor",
        description="Tell what is installed, what works on this machine, and why something does not.",
    )
    add_flags(parser, EngineConfig, only=("device",))
    args = parser.parse_args(argv)
    try:
        config = EngineConfig(model_path="", **read_flags(args, EngineConfig))
    except ConfigError as error:
        parser.error(str(error))

    packages = [(name, version or "not installed", PACKAGES.get(name, "")) for name, version in versions().items()]
    print(*table(("package", "version", "for"), packages, left=3), "", sep="\n")
    print(*gpus() or ["no GPU that torch can use"], "", sep="\n")

    try:
        device = resolve_device(config)
    except ConfigError as error:
        print(colored(str(error), "red"))
        return 1
    findings = list(examine(device))
    rows = [(one.part, one.state, f"{one.seconds:.2f}" if one.seconds else "", one.remark) for one in findings]
    header, rule, *lines = table((f"on {_name(device)}", "state", "seconds", "remark"), rows, left=4)
    colors = [COLORS[one.state] for one in findings]
    print(header, rule, *map(colored, lines, colors), "", sep="\n")
    why = verdict(findings, device)
    print(colored("The default path works.", "green") if why is None else colored(why, "red"))
    return 0 if why is None else 1


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def versions() -> dict[str, str]:
    """Return versions of packages by name; "" where one is not installed."""
    found = {
        "Python": platform.python_version(),
        "NVIDIA driver": driver_version(DRIVER_FILE.read_text() if DRIVER_FILE.exists() else ""),
        "CUDA of torch": torch.version.cuda or "",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def driver_version(text: str) -> str:
    """Return the version that the driver reports; "" if there is none."""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ""


def gpus() -> list[str]:
    """Return a line for each GPU that torch sees."""
    lines = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        tested = "" if (about.major, about.minor) in TESTED else ", a generation that is not tested"
        lines.append(
            f"cuda:{index}: {about.name}, compute capability {about.major}.{about.minor}{tested}, "
            f"{about.multi_processor_count} multiprocessors, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    return lines


def examine(device: torch.device) -> Iterator[Finding]:
    """Check all parts that could serve a model of the usual shape on this device."""
    dtype = torch.bfloat16
    shape = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, page_size=16, dtype=dtype)
    if device.type == "cuda":
        missing = kernels_missing(device)
        if missing is None:
            yield _tried("kernels of csrc/: norm, rotation, products", lambda: _run_ops(device, dtype))
            yield _tried("kernels of csrc/: sampling", lambda: _run_sampler(device))
        else:
            yield Finding("kernels of csrc/", State.ABSENT, f"they need {missing}")
        yield from _attention(shape, device)
    else:
        yield _tried("operations of the CPU", lambda: _run_ops(device, dtype))
        found = _tried("products of few rows with int4 weights", lambda: _run_int4(device, dtype))
        yield found if found.remark else replace(found, remark=_int4_kernel())
    yield _tried("attention: torch", lambda: _run_attention("torch", shape, device))
    backend, available = "shared memory", torch.distributed.is_available()
    if device.type == "cuda":
        backend, available = "nccl", available and torch.distributed.is_nccl_available()
    yield from _quantized(device, dtype)
    yield Finding(f"several ranks: {backend}", State.WORKS if available else State.ABSENT)


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
            yield _tried(part, lambda form=form: _run_experts(ops, form, device, dtype))  # type: ignore[misc]
    kept = [form for form in _FORMATS if ops.keeps(form, 768, 2048, dtype)]
    if not kept:
        yield Finding(part, State.WORKS, "dequantized to the model's dtype as they are loaded")
    for form in kept:
        part = f"weights of {form.kind}" + (f" in groups of {form.group}" if form.group else "")
        yield _tried(part, lambda form=form: _run_levels(ops, form, device, dtype))  # type: ignore[misc]


def _run_levels(ops: Ops, form: LevelFormat, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    levels = Levels.empty(form, torch.Size((768, 2048)), device)
    levels.codes.random_(0, 16, generator=generator)  # for fp8, too: these are its smallest numbers
    levels.scales.fill_(0.5)
    if levels.zeros is not None:
        levels.zeros.random_(0, 16, generator=generator)
    if levels.offsets is not None:
        levels.offsets.fill_(0.25)
    x = torch.randn(3, 2048, device=device, generator=generator).to(dtype)
    return ops.bind_levels(levels, dtype, gated=False).linear(x), x.double() @ levels.values().double().T


def _run_experts(ops: Ops, form: LevelFormat, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the results of two experts for three tokens, and the exact ones."""
    generator, hidden, intermediate = torch.Generator(device).manual_seed(0), 256, 128
    packed: list[PackedExperts] = []
    values: list[Tensor] = []
    for width, size, gated in ((2 * intermediate, hidden, True), (hidden, intermediate, False)):
        matrices = PackedExperts.empty(form, (2, width, size), dtype, device, gated=gated)
        wide = torch.empty((2, width, size), dtype=torch.float64, device=device)
        halves = (slice(0, width // 2), slice(width // 2, width)) if gated else (slice(0, width),)
        for expert, rows in product(range(2), halves):
            levels = random_levels(form, torch.Size((rows.stop - rows.start, size)), size**-0.5, generator)
            matrices.fill(expert, rows, levels)
            wide[expert, rows] = levels.values().double()
        packed.append(matrices)
        values.append(wide)
    x, scores = (torch.randn(3, width, device=device, generator=generator).to(dtype) for width in (hidden, 2))
    mixture = Mixture(packed[0], packed[1], 2, Routing(2, renormalize=True))
    in_double = mixture._replace(w13=values[0], w2=values[1])
    return ops.moe(x, scores, mixture), TorchOps().moe(x.double(), scores.double(), in_double)


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
        run = _run_fused if name == "fused" else _run_attention
        found = _tried(part, lambda run=run, name=name, shape=shape: run(name, shape, device))  # type: ignore[misc]
        preferred = [role for role, best in zip(ROLES, first, strict=True) if best == name]
        remark = f"first choice for {' and '.join(preferred)}" if preferred and not found.remark else found.remark
        yield Finding(part, found.state, remark, found.seconds)


def _tried(part: str, case: Callable[[], tuple[Tensor, Tensor]]) -> Finding:
    """Run a case, which returns its result and the exact one, and report how it went."""
    begin = time.perf_counter()
    try:
        with torch.inference_mode(), _warnings_off():
            have, want = case()
            error = float((have.double() - want.double()).norm() / want.double().norm())
    except Exception as raised:  # a broken installation may raise anything, which is the finding
        return Finding(part, State.FAILS, one_line(raised), time.perf_counter() - begin)
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


def _run_ops(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 2048, device=device, generator=generator).to(dtype)
    norm = Norm(torch.randn(2048, device=device, generator=generator).to(dtype), 1e-6)
    weight = (torch.randn(768, 2048, device=device, generator=generator) / 32).to(dtype)
    ops = make_ops(device)
    exact = TorchOps().norm_linear(x.double(), Norm(norm.weight.double(), norm.eps), weight.double())
    return ops.norm_linear(x, norm, weight), exact


def _run_int4(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, 2048, device=device, generator=generator).to(dtype)
    weight = (torch.randn(768, 2048, device=device, generator=generator) / 32).to(dtype)
    grid = round_to_int4(weight)
    return make_ops(device).bind(weight, grid).linear(x), x.double() @ weight.double().T


def _int4_kernel() -> str:
    """Name the kernel of few rows with int4 weights on this CPU; if it is torch's, say why."""
    try:
        load_int4_linear()
    except CompilationError as error:
        return f"by torch's kernel, which is slower than csrc/int4_cpu.cpp: {error}"
    return "by csrc/int4_cpu.cpp"


def _run_sampler(device: torch.device) -> tuple[Tensor, Tensor]:
    from minisgl.engine.cuda_sampler import CudaSampler

    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(5, 4096, device=device, generator=generator)
    slots = torch.arange(5, device=device)
    sampled = []
    for sampler in (CudaSampler(device), TorchSampler()):
        state = SlotState(num_slots=5, max_seq_len=8, page_size=1, scratch_page=0, device=device)
        sampled.append(sampler.sample(logits, slots, state, SamplingFlags(0)))
    return sampled[0], sampled[1]


def _run_attention(name: str, shape: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    trial = AttentionTest(shape, device, "decode" if shape.latent_dim is None else "prefill")
    have = trial.run(make_backend(name, shape, device))
    return have, trial.right(trial.q)[..., : have.shape[-1]]


def _run_fused(_: str, shape: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    from minisgl.attention.fused import FusedDecode

    trial = AttentionTest(shape, device)
    angles = torch.outer(torch.arange(64.0), torch.rand(shape.head_dim // 2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    heads = Heads(shape.num_heads, shape.num_kv_heads, cos_sin, None, None)
    slots, table = torch.arange(3, device=device), trial.inputs.page_table
    rows = FusedDecode([shape], device).rows(shape, slots, trial.inputs.kv_lens_device, table)
    have = rows.forward(trial.qkv, heads, trial.pool.keys(0), trial.pool.values(0))
    positions = trial.inputs.kv_lens_device.long() - 1
    places = table.gather(1, (positions // shape.page_size).unsqueeze(1)).squeeze(1) * shape.page_size
    q = TorchOps().norm_rope_store(
        trial.qkv.float(),
        heads,
        positions,
        places + positions % shape.page_size,
        trial.exact.keys(0),
        trial.exact.values(0),
    )
    return have, trial.right(q)

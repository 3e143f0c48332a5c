"""Small cases of the parts that can be tried: each returns its result and the exact one."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from minisgl.attention.backend_choice import make_backend
from minisgl.attention.base import AttentionSpec
from minisgl.attention.self_test import AttentionTest
from minisgl.engine.sampling.sampler import TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.availability import make_ops
from minisgl.kernel.base import Heads, Mixture, Norm, Ops, Routing
from minisgl.kernel.torch_ops import TorchOps
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.random_levels import random_levels
from minisgl.quantization.rounding import round_to_int4
from minisgl.sampling_params import SamplingFlags


def run_ops(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 2048, device=device, generator=generator).to(dtype)
    norm = Norm(torch.randn(2048, device=device, generator=generator).to(dtype), 1e-6)
    weight = (torch.randn(768, 2048, device=device, generator=generator) / 32).to(dtype)
    ops = make_ops(device)
    exact = TorchOps().norm_linear(x.double(), Norm(norm.weight.double(), norm.eps), weight.double())
    return ops.norm_linear(x, norm, weight), exact


def run_int4(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, 2048, device=device, generator=generator).to(dtype)
    weight = (torch.randn(768, 2048, device=device, generator=generator) / 32).to(dtype)
    grid = round_to_int4(weight)
    return make_ops(device).bind(weight, grid).linear(x), x.double() @ weight.double().T


def run_sampler(device: torch.device) -> tuple[Tensor, Tensor]:
    from minisgl.engine.sampling.cuda_sampler import CudaSampler

    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(5, 4096, device=device, generator=generator)
    slots = torch.arange(5, device=device)
    sampled = []
    for sampler in (CudaSampler(device), TorchSampler()):
        state = SlotState(num_slots=5, max_seq_len=8, page_size=1, scratch_page=0, device=device)
        sampled.append(sampler.sample(logits, slots, state, SamplingFlags(0)))
    return sampled[0], sampled[1]


def run_levels(ops: Ops, form: LevelFormat, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    levels = Levels.empty(form, torch.Size((768, 2048)), device)
    levels.codes.random_(0, 16, generator=generator)  # for fp8, too: these are its smallest numbers
    levels.scales.fill_(0.5)
    if levels.zeros is not None:
        levels.zeros.random_(0, 16, generator=generator)
    if levels.offsets is not None:
        levels.offsets.fill_(0.25)
    x = torch.randn(3, 2048, device=device, generator=generator).to(dtype)
    return ops.bind_levels(levels, dtype, gated=False).linear(x), x.double() @ levels.dequantize().double().T


def run_experts(ops: Ops, form: LevelFormat, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
            wide[expert, rows] = levels.dequantize().double()
        packed.append(matrices)
        values.append(wide)
    x, scores = (torch.randn(3, width, device=device, generator=generator).to(dtype) for width in (hidden, 2))
    mixture = Mixture(packed[0], packed[1], 2, Routing(2, renormalize=True))
    in_double = mixture._replace(w13=values[0], w2=values[1])
    return ops.moe(x, scores, mixture), TorchOps().moe(x.double(), scores.double(), in_double)


def run_attention(name: str, shape: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    trial = AttentionTest(shape, device, "decode" if shape.latent is None else "prefill")
    have = trial.run(make_backend(name, shape, device))
    return have, trial.right(trial.q)[..., : have.shape[-1]]


def run_fused(_: str, shape: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
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

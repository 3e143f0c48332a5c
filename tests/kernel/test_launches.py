"""Launches of csrc/'s kernels: every wrapper is called with CPU tensors, and its launches match the declarations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import minisgl
from minisgl.attention.base import AttentionInputs, AttentionSpec, ExpandingPlan
from minisgl.distributed import TPGroup
from minisgl.engine.queue import token_copier
from minisgl.engine.state import SlotState
from minisgl.kernel.base import (
    ClampedSwiGLU,
    ExpertBiases,
    ExpertKind,
    Heads,
    KernelNeeds,
    LatentDims,
    LatentRows,
    Mixture,
    Norm,
    Product,
    Routing,
)
from minisgl.kernel.delta_net.recurrent_rows import SingleRows, captured_rows
from minisgl.kernel.gemm.fp8_rows import Fp8Products, empty_rows
from minisgl.kernel.launch.signature import KernelSpec, Launcher, Parameter, make_launcher, parse_signature
from minisgl.layers.layer_config import MoEConfig, NormConfig
from minisgl.layers.linear import allocate, bind_weights
from minisgl.layers.mlp import SparseMLP
from minisgl.layers.norm import RMSNorm
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.rounding import INT4_FORMAT
from minisgl.sampling_params import SamplingFlags
from support.delta_net import make_layer, projection

CSRC = Path(minisgl.__file__).parent / "csrc"
CPU = torch.device("cpu")
WRAPPERS = (
    "minisgl.attention.fused",
    "minisgl.attention.latent.backend",
    "minisgl.attention.latent.decode",
    "minisgl.attention.latent.prefill",
    "minisgl.engine.sampling.cuda_sampler",
    "minisgl.kernel.collectives.all_reduce",
    "minisgl.kernel.collectives.long_sums",
    "minisgl.kernel.delta_net.cuda_step",
    "minisgl.kernel.delta_net.cuda_chunks",
    "minisgl.kernel.cuda_latent",
    "minisgl.kernel.experts.cuda_moe",
    "minisgl.kernel.cuda_ops",
    "minisgl.kernel.experts.cuda_routing",
    "minisgl.kernel.gemm.fp8_gemm",
    "minisgl.kernel.gemm.quantized_gemm",
    "minisgl.kernel.gemm.skinny_gemm",
    "minisgl.kernel.gemm.small_batch_gemm",
)
SOURCE = """
extern "C" __global__ void __launch_bounds__(128) scale(
    const T* x, OPTIONAL const W* weight, float* out, const __grid_constant__ TensorMap map, long long stride, int n,
    float factor) { other(x); }
"""
MACROS = {"SCALAR": "bf16", "NORM_SCALAR": "f32"}


def declared() -> set[str]:
    """All kernels of csrc/."""
    declaration = r'extern "C" __global__ void (?:__\w+__\([^)]*\) )?(\w+)\('
    return {name for path in CSRC.glob("*.cu") for name in re.findall(declaration, path.read_text())}


def returns_early() -> set[str]:
    """Kernels of csrc/ that may return before they wait for their predecessor."""
    found = set()
    for path in CSRC.glob("*.cu"):
        kernels = re.findall(r'extern "C" __global__ void[^;{]*?\b(\w+)\([^)]*\) \{\n(.*?)\n\}', path.read_text(), re.S)
        for name, body in kernels:
            before, waits, _ = body.partition("wait_for_predecessor()")
            if waits and "return;" in before:
                found.add(name)
    return found


class Recorder:
    """Stands in for `Compiler`: parses the real sources, compiles nothing and records the launches."""

    arch = 90
    num_sms = 132
    block_shared_bytes = 232448

    def __init__(self, launched: list[str]) -> None:
        self._launched = launched

    def begin(self, specs: Iterable[KernelSpec]) -> None:
        for spec in specs:
            self._parse(spec)

    def kernel(self, describe: Callable[..., KernelSpec], *args: Hashable) -> Launcher:
        spec = describe(*args)
        parameters = self._parse(spec)

        def submit(grid: tuple[int, ...], block: int, cluster: int, early: bool, arguments: tuple[Any, ...]) -> None:
            assert len(arguments) == len(parameters)
            assert all(count > 0 for count in (*grid, block, cluster))
            self._launched.append(spec.name)

        return make_launcher(spec.name, parameters, submit)

    @staticmethod
    def _parse(spec: KernelSpec) -> tuple[Parameter, ...]:
        return parse_signature((CSRC / spec.file).read_text(), spec.name, spec.macros)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels launched, in order, by wrappers that were imported without CUDA's packages."""
    names: list[str] = []
    compile_module = ModuleType("minisgl.kernel.launch.compile")
    compile_module.__dict__.update(Compiler=lambda _: Recorder(names), tensor_map=lambda tensor, *box: (tensor, *box))
    for name in WRAPPERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "minisgl.kernel.launch.compile", compile_module)
    monkeypatch.setattr("minisgl.engine.queue.kernels_missing", lambda _: None)
    monkeypatch.setattr("minisgl.attention.backends.page_kernels.has_kernels", lambda _: True)
    properties = SimpleNamespace(multi_processor_count=132, memory_clock_rate=2619000, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    yield names
    for name in WRAPPERS:
        if sys.modules.pop(name, None) is not None:
            parent, _, child = name.rpartition(".")
            delattr(sys.modules[parent], child)


def scale() -> tuple[Launcher, list[tuple[Any, ...]]]:
    calls: list[tuple[Any, ...]] = []
    return make_launcher("scale", parse_signature(SOURCE, "scale", MACROS), lambda *call: calls.append(call)), calls


def arguments() -> dict[str, Any]:
    return {
        "x": torch.zeros(4, dtype=torch.bfloat16),
        "weight": torch.zeros(4),
        "out": torch.zeros(4),
        "map": "a tensor map",
        "stride": 1 << 40,
        "n": 4,
        "factor": 0.5,
    }


def test_arguments_become_what_the_declaration_says() -> None:
    launch, calls = scale()
    given = arguments()
    launch((3, 1), 128, cluster=2, early=False, **dict(reversed(given.items())))
    launch((3,), 128, **given | {"weight": None})
    pointers = [given[name].data_ptr() for name in ("x", "weight", "out")]
    rest = ["a tensor map", 1 << 40, 4, 0.5]
    assert calls == [
        ((3, 1), 128, 2, False, (*pointers, *rest)),
        ((3,), 128, 1, True, (pointers[0], 0, pointers[2], *rest)),
    ]
    assert [type(value) for value in calls[0][4][4:]] == [np.int64, np.int32, np.float32]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(4)}, "scale: x is of torch.float32, not torch.bfloat16"),
        ({"weight": torch.zeros(4, dtype=torch.bfloat16)}, "scale: weight is of torch.bfloat16, not torch.float32"),
        ({"x": None}, "scale: x is None"),
        ({"x": 12345}, "scale: x is 12345, not a tensor"),
        ({"n": 1 << 31}, "scale: n is 2147483648, beyond"),
        ({"n": 4.5}, "scale: n is 4.5, not a number of type int"),
        ({"n": torch.tensor(4)}, "scale: n is tensor"),
        ({"stride": 1 << 63}, "scale: stride is 9223372036854775808, beyond"),
        ({"factor": "0.5"}, "scale: factor is '0.5', not a number of type float"),
        ({"m": 4}, "scale.*unexpected keyword argument 'm'"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_launched(wrong: dict[str, Any], message: str) -> None:
    launch, calls = scale()
    with pytest.raises(TypeError, match=message):
        launch((1,), 128, **arguments() | wrong)
    assert not calls


@pytest.mark.parametrize("missing", arguments())
def test_a_missing_argument_is_named(missing: str) -> None:
    launch, calls = scale()
    given = arguments()
    del given[missing]
    with pytest.raises(TypeError, match=f"scale.*'{missing}'"):
        launch((1,), 128, **given)
    assert not calls


def test_numbers_are_converted_once_and_in_bounds() -> None:
    launch, calls = scale()
    for n in (0, 5, -7, True, np.int64(9), *range(10_000), 5):
        launch((1,), 128, **arguments() | {"n": n})
        assert calls.pop()[4][5] == n


def test_a_type_that_no_launch_can_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="k: y is of type 'double'"):
        parse_signature('extern "C" __global__ void k(const float* x, double y) {}', "k", {})
    with pytest.raises(ValueError, match="no extern"):
        parse_signature(SOURCE, "other", MACROS)


def test_every_wrapper_passes_what_its_kernels_declare(launched: list[str]) -> None:
    """Each launch is bound to the real signature, so a wrong name or dtype fails here, without a GPU."""
    half, fp8 = torch.bfloat16, torch.float8_e4m3fn
    run_ops(half, half)
    run_ops(torch.float16, fp8)
    run_quantized()
    run_moe(half)
    run_delta_net(half)
    run_attention(half, fp8)
    run_sampling(half)
    run_collectives(half)
    run_long_sums(half)
    assert set(launched) == declared()


def run_ops(dtype: torch.dtype, cache: torch.dtype) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    ops = CudaOps(CPU)
    products = frozenset(
        {Product(2048, 1024, True, None), Product(2048, 1024, True, "silu"), Product(1024, 1024, False, None)}
    )
    ops.begin_compiling(
        KernelNeeds(
            dtype,
            cache,
            dtype,
            frozenset({128}),
            products,
            frozenset({ExpertKind(8, 2, ClampedSwiGLU(1.702, 7.0))}),
            delta_taps=frozenset({4}),
            latents=frozenset({LatentDims(512, 64, 128, 128)}),
        )
    )
    weight, bias = torch.zeros(2048, 1024, dtype=dtype), torch.zeros(2048, dtype=dtype)
    norm = Norm(torch.zeros(1024, dtype=dtype), 1e-6)
    for rows in (1, 20, 70):  # skinny, a small batch, torch's
        x, residual = torch.zeros(rows, 1024, dtype=dtype), torch.zeros(rows, 2048, dtype=dtype)
        ops.linear(x, weight, bias, residual)
        ops.norm_linear(x, norm, weight, out=torch.empty_like(residual))
        ops.norm_linear(x, Norm(norm.weight.float(), 1e-6), weight)
        ops.norm_gated_linear(x, norm, weight, bias, activation="gelu_tanh")
        ops.norm_add(x, norm, torch.zeros_like(x), norm, factor=bias[:1])
    slots = torch.zeros(3, dtype=torch.int64)
    ints = torch.ones(9, 20, dtype=torch.int32)
    for pages in (True, False):
        inputs = ops.decode_inputs(slots, ints, ints[:, 0].contiguous(), ints, 16, pages=pages)
    ops.embed(slots, weight)
    caches = [torch.zeros(2, 16, 2, 128).to(cache) for _ in range(2)]
    head = Norm(torch.zeros(128, dtype=dtype), 1e-6)
    for norms in ((head, head), (None, None)):
        heads = Heads(8, 2, torch.zeros(99, 128), *norms)
        ops.norm_rope_store(torch.zeros(3, 12 * 128, dtype=dtype), heads, slots, inputs.out_cache_loc, *caches)
    q_rope, row = torch.zeros(3, 8, 16, dtype=dtype), torch.zeros(3, 48, dtype=dtype)
    latents = torch.zeros(2, 16, 1, 48).to(cache)
    latent_norm, query = Norm(torch.zeros(32, dtype=dtype), 1e-6), torch.zeros(3, 8, 48, dtype=dtype)
    rows = LatentRows(row, latent_norm, torch.zeros(99, 16), slots, inputs.out_cache_loc, latents)
    ops.norm_rope_store_latent(rows, q_rope, query[..., 32:])


def run_quantized() -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    ops, dtype = CudaOps(CPU), torch.bfloat16
    norm, bias = Norm(torch.zeros(256, dtype=dtype), 1e-6), torch.zeros(512, dtype=dtype)
    forms = LevelFormat("fp8"), LevelFormat("int4", 128, zeros=True), LevelFormat("int8"), INT4_FORMAT
    ordered = LevelFormat("int4", 128, order=tuple(reversed(range(256))))
    rounding = LevelFormat("fp8", 128, rounds_x=True), LevelFormat("fp8", rounds_x=True, x_scale=0.02)
    for form in (*forms, ordered, *rounding):
        for gated in (False, True):
            assert ops.keeps(form, 512, 256, dtype)
            levels = Levels.empty(form, torch.Size((512, 256)), CPU)
            levels.scales.zero_()
            weight = ops.bind_levels(levels, dtype, gated=gated)
            for rows in (1, 60) if form.rounds_x else (1, 2, 60, 130, 300):
                x, residual = torch.zeros(rows, 256, dtype=dtype), torch.zeros(rows, 512, dtype=dtype)
                weight.linear(x, bias, residual)
                weight.norm_linear(x, norm, out=residual)
                if gated:
                    weight.norm_gated_linear(x, norm, bias, activation="silu")
                if isinstance(weight, Fp8Products):
                    assert weight.linear_of_rounded(empty_rows(rows, 256, 128, CPU), bias, residual).shape == (
                        rows,
                        512,
                    )
                    many = empty_rows(300, 256, 128, CPU)
                    product = weight._gemm.persistent_product
                    assert product(many, weight._matrix, bias, residual, dtype).shape == (300, 512)
                    assert product(many, weight._matrix, bias, None, dtype, gate="silu").shape == (300, 256)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("rows", "size", "supported"), [(64, 2880, True), (33, 4096, True), (32, 2880, False), (64, 1024, False)]
)
def test_a_vocabulary_is_multiplied_where_it_was_measured(rows: int, size: int, supported: bool) -> None:
    from minisgl.kernel.gemm.small_batch_gemm import SmallBatchGemm
    from minisgl.kernel.launch.compile import Compiler

    x, weight = (torch.empty(count, size, dtype=torch.bfloat16) for count in (rows, 70_000))
    assert SmallBatchGemm(Compiler(CPU)).supports(x, weight) == supported


def run_moe(dtype: torch.dtype) -> None:
    from minisgl.kernel.cuda_ops import CudaOps
    from minisgl.kernel.experts.cuda_routing import CudaRouting
    from minisgl.kernel.launch.compile import Compiler

    w13, w2 = torch.zeros(8, 64, 64, dtype=dtype), torch.zeros(8, 64, 32, dtype=dtype)
    biases = ExpertBiases(w13=torch.zeros(8, 64, dtype=dtype), w2=torch.zeros(8, 64, dtype=dtype))
    mixture = Mixture(w13, w2, 8, Routing(2, renormalize=True))
    clamped = mixture._replace(biases=biases, activation=ClampedSwiGLU(1.702, 7.0))
    for tokens in (4, 100, 200):  # routed in the products, by one block, by many
        x, scores = torch.zeros(tokens, 64, dtype=dtype), torch.zeros(tokens, 8, dtype=dtype)
        CudaOps(CPU).moe(x, scores, mixture)
        CudaOps(CPU).moe(x, scores, clamped, x)
        for form in (LevelFormat("fp8", 128), LevelFormat("mxfp4", 32)):
            shapes = (((8, 64, 128), True), ((8, 128, 32), False))
            packed = [PackedExperts.empty(form, shape, dtype, CPU, gated=gated) for shape, gated in shapes]
            wide = torch.zeros(tokens, 128, dtype=dtype)
            quantized = mixture._replace(w13=packed[0], w2=packed[1])
            assert CudaOps(CPU).moe(wide, scores, quantized).shape == wide.shape
        CudaOps(CPU).moe(x, scores, mixture._replace(w13=w13[5:], w2=w2[5:], first=5))
        CudaOps(CPU).moe_chosen(x, scores[:, :2], scores[:, :2].long(), w13, w2)
        grouped = Routing(2, renormalize=True, score="sigmoid", groups=4, top_groups=2)
        weights, experts = CudaRouting(Compiler(CPU))(scores.float(), grouped, torch.zeros(8))
        assert weights.shape == experts.shape == (tokens, 2)
    x, router = torch.zeros(5, 256, dtype=dtype), torch.zeros(8, 256)
    norm = Norm(torch.zeros(256, dtype=dtype), 1e-6)
    for weight in (router, torch.zeros(32, 256, dtype=dtype)):
        normed, logits = CudaOps(CPU).norm_router(x, norm, weight, None)
        assert (normed.shape, logits.shape, logits.dtype) == ((5, 256), (5, len(weight)), weight.dtype)
    w13, w2 = packed_experts(LevelFormat("mxfp4", 32), 32, 256, 64)
    many = Mixture(w13, w2, 32, Routing(2, renormalize=True))
    for each in CudaOps(CPU).norm_moe(x, norm, weight, None, None, many, x):
        assert each.shape == x.shape


def packed_experts(form: LevelFormat, count: int, hidden: int, size: int) -> tuple[PackedExperts, PackedExperts]:
    w13, w2 = (
        PackedExperts.empty(form, shape, torch.bfloat16, CPU, gated=gated)
        for shape, gated in (((count, 2 * size, hidden), True), ((count, hidden, size), False))
    )
    return w13, w2


def test_experts_of_some_tokens_are_chosen_with_the_router(launched: list[str]) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    mixture = Mixture(*packed_experts(LevelFormat("fp8", 128), 64, 128, 128), 64, Routing(4, renormalize=True))
    norm, router = Norm(torch.zeros(128, dtype=torch.bfloat16), 1e-6), torch.zeros(64, 128, dtype=torch.bfloat16)
    rest = ["quantized_moe_gated", "quantized_moe_weighted", "moe_combine"]
    chosen = ["moe_router_choose", "moe_sort"]
    planned = ["moe_router", "moe_plan"]
    for tokens, choice in ((16, planned), (17, chosen), (256, chosen), (257, ["rms_norm", "moe_route", "moe_sort"])):
        del launched[:]
        x = torch.zeros(tokens, 128, dtype=torch.bfloat16)
        CudaOps(CPU).norm_moe(x, norm, router, None, None, mixture, x)
        assert launched == [*choice, *rest]
    del launched[:]
    CudaOps(CPU).norm_moe(x[:64], norm, router.float(), None, None, mixture)
    assert launched == [*planned, *rest]


@pytest.mark.parametrize(
    ("experts", "choice_of_many"),
    [(32, ["moe_router_choose", "moe_sort"]), (8, ["moe_router", "moe_plan"]), (500, ["rms_norm", "moe_plan"])],
)
def test_a_shared_expert_takes_no_launch_of_its_own(
    launched: list[str], experts: int, choice_of_many: list[str]
) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    config = MoEConfig(experts, 32, Routing(2, renormalize=True), shared_intermediate_size=64, shared_gate=True)
    block, norm = (
        SparseMLP(config, 64, tp=cast(TPGroup, Rank(0, 1)), dtype=torch.bfloat16),
        RMSNorm(64, NormConfig(1e-6), dtype=torch.bfloat16),
    )
    for module in block.modules():
        allocate(module, CPU)
    ops = CudaOps(CPU)
    bind_weights(block, ops)
    context: Any = SimpleNamespace(ops=ops)
    few, many = (torch.zeros(tokens, 64, dtype=torch.bfloat16) for tokens in (16, 17))
    block(few, norm, context, few)
    assert launched == ["moe_router", "moe_plan", "moe_gated", "moe_weighted", "moe_combine"]
    block(many, norm, context, many)
    assert launched[5:] == [*choice_of_many, "moe_gated", "moe_weighted", "moe_combine", "activate_and_mul"]


def test_clusters_sum_the_quantized_experts_of_few_tokens(launched: list[str]) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    mixture = Mixture(*packed_experts(LevelFormat("fp8", 128), 8, 128, 128), 8, Routing(4, renormalize=True))
    for tokens in (2, 3):  # two tokens make 8 pairs
        x, scores = (torch.zeros(tokens, size, dtype=torch.bfloat16) for size in (128, 8))
        assert CudaOps(CPU).moe(x, scores, mixture, x).shape == x.shape
    products = ["quantized_moe_gated", "quantized_moe_weighted"]
    assert launched == [*products, "moe_plan", *products, "moe_combine"]


def run_delta_net(dtype: torch.dtype) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    layer = make_layer(2, 4, 128, 128, slots=3, dtype=dtype, device="cpu")
    projected, rows = projection(layer.heads, 2, dtype, "cpu"), SingleRows(torch.tensor([2, 0]), torch.tensor([0, 7]))
    ops, out = CudaOps(CPU), torch.empty(2, 4 * 128, dtype=dtype)
    assert ops.delta_graph_safe(layer.heads, dtype)
    ops.delta_step(projected, layer.heads, layer.inputs, layer.memory, rows, out)
    both = captured_rows(torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([1, 2]), torch.arange(2))
    assert both.single is not None
    assert both.chunked is not None
    ops.delta_chunks(projected, layer.heads, layer.inputs, layer.memory, both.chunked, out)
    ops.delta_step(projected, layer.heads, layer.inputs, layer.memory, both.single, out)


def run_latents(dtype: torch.dtype) -> None:
    from minisgl.attention.latent.backend import LatentAttentionBackend
    from minisgl.kernel.cuda_ops import CudaOps

    spec = AttentionSpec(16, 1, 576, 16, dtype, latent=LatentDims(512, 64, 128, 128))
    backend = LatentAttentionBackend(spec, CPU)
    pool: Any = SimpleNamespace(keys=lambda _: torch.zeros(2, 16, 1, 576, dtype=dtype))
    for query_lens in ([1] * 3, [1] * 200, [5, 1], [200, 1, 70]):  # decodes in splits or not, short chunks, long ones
        counts, tokens = np.array(query_lens, dtype=np.int32), sum(query_lens)
        starts = torch.tensor([0, *counts.cumsum()], dtype=torch.int32)
        table = torch.ones(len(counts), 20, dtype=torch.int32)
        plan = backend.plan(AttentionInputs(counts, counts, starts, torch.from_numpy(counts), table))
        assert isinstance(plan, ExpandingPlan) == (max(query_lens) == 200)
        assert plan.forward(0, torch.zeros(tokens, 16, 576, dtype=dtype), pool).shape == (tokens, 16, 512)
        if isinstance(plan, ExpandingPlan):
            assert plan.absorbed is not None
            assert plan.absorbed.tokens.tolist() == [200]
            q_nope, q_rope = torch.zeros(tokens, 16, 192, dtype=dtype).split([128, 64], dim=-1)
            weight, out = torch.zeros(16, 256, 512, dtype=dtype), torch.zeros(tokens, 16, 128, dtype=dtype)
            plan.forward_expanded(0, q_nope, q_rope, weight, pool, out)
    ops, table, norm = CudaOps(CPU), torch.zeros(99, 64), Norm(torch.zeros(512, dtype=dtype), 1e-6)
    for tokens in (3, 100):
        x, row = torch.zeros(tokens, 16 * 192, dtype=dtype), torch.zeros(tokens, 576, dtype=dtype)
        q_nope, q_rope = (x[:, columns].view(tokens, 16, -1) for columns in (slice(2048), slice(2048, 3072)))
        places = torch.zeros(tokens, dtype=torch.int64)
        rows = LatentRows(row, norm, table, places, places, torch.zeros(2, 16, 1, 576, dtype=dtype))
        query = ops.latent_query(rows, q_nope, q_rope, weight[:, :128])
        assert query.shape == (tokens, 16, 576)
        assert ops.latent_values(query[..., :512].contiguous(), weight[:, 128:]).shape == (tokens, 16, 128)


def run_attention(dtype: torch.dtype, cache: torch.dtype) -> None:
    from minisgl.attention.backends.page_kernels import PageUpcaster
    from minisgl.attention.fused import FusedDecode

    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=dtype, window=64, fp8_kv=True)
    fused = FusedDecode([spec], CPU)
    fused.begin_compiling(4)
    slots, lengths = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int32)
    table = torch.ones(9, 20, dtype=torch.int32)
    caches = [torch.zeros(2, 16, 2, 128).to(cache) for _ in range(2)]
    rows = fused.rows(spec, slots, lengths, table)
    qkv, heads = torch.zeros(3, 12 * 128, dtype=dtype), Heads(8, 2, torch.zeros(99, 128), None, None)
    rows.forward(qkv, heads, *caches)
    rows.forward(qkv, heads, *caches, sinks=torch.zeros(8, dtype=dtype))
    fused.begin_compiling(4, rounded=True)
    many = fused.rows(spec, *(each.repeat(30, *[1] * (each.dim() - 1)) for each in (slots, lengths)), table)
    assert many.rounds
    assert not fused.rows(spec, slots[:1], lengths[:1], table).rounds
    assert many.forward_rounded(qkv.repeat(30, 1), heads, *caches).codes.shape == (128, 1024)
    run_latents(dtype)
    upcaster = PageUpcaster(spec, CPU)
    upcast = tuple(torch.zeros(2, 16, 2, 128, dtype=dtype) for _ in range(2))
    pool: Any = SimpleNamespace(keys=lambda _: caches[0], values=lambda _: caches[1], upcast_buffer=upcast)
    inputs: Any = SimpleNamespace(page_table=table, kv_lens_device=table[:, 0].contiguous())
    upcaster.for_step(inputs)(0, pool)


def run_sampling(dtype: torch.dtype) -> None:
    from minisgl.engine.sampling.cuda_sampler import CudaSampler

    sampler = CudaSampler(CPU)
    sampler.begin_compiling(dtype)
    state = SlotState(num_slots=4, max_seq_len=8, page_size=1, scratch_page=0, device=CPU)
    logits, slots = torch.zeros(3, 1000, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    for bitmask in (None, torch.zeros(3, 32, dtype=torch.int32)):
        for flags in (SamplingFlags.SAMPLED, SamplingFlags.SAMPLED | SamplingFlags.PROCESSED):
            sampled = sampler.sample(logits, slots, state, flags, bitmask)
    sampler.begin_compiling_sharded(dtype, 4)
    sampler.sample_sharded(logits, slots, state, cast(TPGroup, Rank(1, 4)), torch.zeros(4, dtype=torch.int64), 3900)
    token_copier(CPU)(sampled, torch.zeros(8, dtype=torch.int32))


class Rank:
    """One of several ranks that all have the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, self.size)


def run_collectives(dtype: torch.dtype) -> None:
    from minisgl.kernel.collectives.all_reduce import PushAllReduce, PushSizes
    from minisgl.kernel.launch.compile import Compiler

    memory: Any = SimpleNamespace(addresses=torch.zeros(4, dtype=torch.int64))
    push = PushAllReduce(Compiler(CPU), 1, memory, PushSizes(1024, 4096), timeout_s=1.0)
    x = torch.zeros(8, 64, dtype=dtype)
    for one in (x, x.repeat(2, 1)):  # one shot, two shots
        assert push.supports(one)
        push(one)
        push(one, one.clone())
    assert not push.supports(x.repeat(5, 1))
    rows, norm = torch.zeros(9, 256, dtype=dtype), Norm(torch.zeros(256, dtype=dtype), 1e-6)
    assert not push.norms(rows)  # in two shots
    larger = PushAllReduce(Compiler(CPU), 1, memory, PushSizes(8192, 8192), timeout_s=1.0)
    assert larger.norms(rows)
    assert larger.sum_and_norm(rows, rows.clone(), norm)[1].shape == (9, 256)
    weight = torch.zeros(256, 512, dtype=dtype)
    assert larger.multiplies(rows.repeat(1, 2), weight, rows)
    for one in (norm, None):
        assert larger.product_sum(rows.repeat(1, 2), weight, rows, one)[0] is rows
    assert push.gathers(x, 4 * 64 - 8)
    assert push.gather(x, 4 * 64 - 8).shape == (8, 4 * 64 - 8)
    push.abort()
    push.check()


def run_long_sums(dtype: torch.dtype) -> None:
    from minisgl.kernel.collectives.long_sums import LongSums, supports_rows
    from minisgl.kernel.launch.compile import Compiler

    size = LongSums.bytes_for(300, 256, dtype) // 4
    memory: Any = SimpleNamespace(
        words=torch.zeros(size, dtype=torch.int32), addresses=torch.zeros(4, dtype=torch.int64)
    )
    failed, status = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    shared = {"rank": 1, "status": status, "failed": failed, "patience": 10**9}
    sums = LongSums(Compiler(CPU), memory, shared, sizes=range(100, 301), width=256, dtype=dtype)
    residual = torch.zeros(300, 256, dtype=dtype)
    for other in (residual[:99], residual.repeat(2, 1), residual[:, :128], residual.float()):
        assert sums.part_like(other) is None
    part = sums.part_like(residual)
    assert part is not None
    assert part.shape == residual.shape
    total, normed = sums.add(part, residual, Norm(torch.zeros(256, dtype=dtype), 1e-6))
    assert total is residual
    assert normed is not None
    assert normed.shape == residual.shape
    assert sums.add(part, residual, None)[0].data_ptr() == normed.data_ptr()
    assert supports_rows(5120, dtype)
    assert not supports_rows(5120, torch.float32)  # more than 1,024 vectors
    assert not supports_rows(576, dtype)


def test_kernels_wait_before_they_return() -> None:
    """A grid that ended before its predecessor would tell its successor too early that all is written (common.cuh)."""
    # In any step some block of decode_attention has work. `received` returns early only when a rank has failed.
    assert returns_early() == {"decode_attention", "received"}


def test_files_whose_headers_wait_say_so_themselves() -> None:
    """`Compiler` searches only the file itself: with the wait in a header, its kernels would begin 3 us late."""
    waits = "wait_for_predecessor()"
    sources = {path.name: path.read_text() for path in CSRC.iterdir()}

    def includes_a_wait(name: str) -> bool:
        included = set(re.findall(r'#include "(.*)"', sources[name])) - {"common.cuh"}  # common.cuh defines the wait
        return any(waits in sources[one] or includes_a_wait(one) for one in included)

    concerned = [name for name in sources if name.endswith(".cu") and includes_a_wait(name)]
    assert {"moe_gemm.cu", "quantized_moe.cu"} <= set(concerned)
    assert [name for name in concerned if waits not in sources[name]] == []

"""The kernels of csrc/ against torch in higher precision, on random shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minisgl.kernel.base import Activation, GateActivation, Heads, Norm, Ops
from minisgl.kernel.torch_ops import TorchOps

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # relative to the norm of the result


@pytest.fixture(scope="module")
def ops() -> Ops:
    from minisgl.kernel.cuda_ops import CudaOps

    return CudaOps(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    error = (out.double() - reference.double()).norm() / reference.double().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1024), (3, 5120), (257, 2048), (5, 72), (4, 12288)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, tokens: int, size: int) -> None:
    x = torch.randn(tokens, size, device="cuda").to(dtype)
    weight = torch.randn(size, device="cuda").to(dtype)
    close(ops.rms_norm(x, Norm(weight, 1e-6)), TorchOps().rms_norm(x.double(), Norm(weight.double(), 1e-6)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
@pytest.mark.parametrize(("tokens", "size"), [(1, 1024), (3, 3840), (257, 2048), (5, 72), (4, 12288)])
def test_norm_add(ops: Ops, dtype: torch.dtype, norm_dtype: torch.dtype | None, tokens: int, size: int) -> None:
    """The end of a block: its norm, the sum, a factor, and the next block's norm."""
    x, residual = (torch.randn(tokens, size, device="cuda").to(dtype) for _ in range(2))
    norm, *others = (Norm(torch.randn(size, device="cuda").to(norm_dtype or dtype), 1e-6) for _ in range(4))
    for count, factor in ((0, None), (1, None), (1, torch.tensor([0.7], device="cuda").to(dtype)), (3, None)):
        total, *normed = ops.norm_add(x.clone(), norm, residual.clone(), *others[:count], factor=factor)
        want = ops.rms_norm(x, norm).add_(residual)
        want = want if factor is None else want.mul_(factor)
        close(total, want, dtype)
        for have, after in zip(normed, others[:count], strict=True):
            close(have, TorchOps().rms_norm(total.double(), Norm(after.weight.double(), 1e-6)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid"])
def test_activate_rows_that_are_apart(ops: Ops, dtype: torch.dtype, activation: GateActivation) -> None:
    gate, all_inputs = (torch.randn(9, *shape, device="cuda").to(dtype) for shape in ((256,), (4, 256)))
    for up in (all_inputs[:, 2], all_inputs[:, 1, :250]):
        own = gate[:, : up.shape[1]]
        have = ops.activate(own.clone(), up, activation)
        close(have, TorchOps().activate(own.double(), up.double(), activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "norm"),
    [(1, 16, 8, True), (33, 40, 8, False), (7, 3, 1, True), (5, 8, 0, True)],
)
def test_norm_rope_store(
    ops: Ops, dtype: torch.dtype, head_dim: int, tokens: int, heads: int, kv_heads: int, norm: bool
) -> None:
    pages, page_size = 20, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    positions = torch.randint(0, 500, (tokens,), device="cuda")
    angles = torch.outer(torch.arange(500), torch.rand(head_dim // 2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).cuda()
    out_cache_loc = torch.randperm(pages * page_size, device="cuda")[:tokens]
    weights = [torch.randn(head_dim, device="cuda").to(dtype) if norm else None for _ in range(2)]

    def run(which: Ops, kind: torch.dtype) -> list[torch.Tensor]:
        caches = [
            torch.full((pages, page_size, max(kv_heads, 1), head_dim), 7.0, device="cuda", dtype=kind) for _ in range(2)
        ]
        q_norm, k_norm = (None if weight is None else Norm(weight.to(kind), 1e-6) for weight in weights)
        table = cos_sin.to(torch.float64 if kind == torch.float64 else torch.float32)
        made = Heads(heads, kv_heads, table, q_norm, k_norm, v_eps=1e-6 if norm else None)
        return [which.norm_rope_store(qkv.to(kind), made, positions, out_cache_loc, *caches), *caches]

    for out, reference in zip(run(ops, dtype), run(TorchOps(), torch.float64), strict=True):
        close(out, reference, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 300])
@pytest.mark.parametrize(
    ("size", "width"),
    [
        *[(1024, 4096), (2048, 1024), (3072, 1024), (96, 40), (5120, 2064), (8192, 1280), (4096, 24576), (768, 256)],
        *[(5120, 3584), (8704, 5120)],  # Qwen3-14B on two ranks
        *[(576, 960), (576, 576), (576, 3072), (1536, 576)],  # SmolLM2's
        *[(2048, 3648), (4096, 2880)],  # two blocks on a multiprocessor
        *[(4096, 4096), (3840, 8192)],  # clusters of eight and of four with short rings
    ],
)
def test_products(ops: Ops, dtype: torch.dtype, rows: int, size: int, width: int) -> None:
    """Up to 8 or 16 rows use skinny_gemm.cu, up to 64 small_batch_gemm.cu, more cuBLAS; all match the reference."""
    x = torch.randn(rows, size, device="cuda").to(dtype)
    weight = (torch.randn(width, size, device="cuda") / size**0.5).to(dtype)
    bias, residual = torch.randn(width, device="cuda").to(dtype), torch.randn(rows, width, device="cuda").to(dtype)
    norm = Norm(torch.randn(size, device="cuda").to(dtype), 1e-6)
    wide = [tensor.double() for tensor in (x, weight, bias, residual)]
    wide_norm, reference = Norm(norm.weight.double(), norm.eps), TorchOps()
    close(ops.linear(x, weight), reference.linear(*wide[:2]), dtype)
    close(ops.linear(x, weight, bias), reference.linear(*wide[:3]), dtype)
    close(ops.linear(x, weight, None, residual.clone()), reference.linear(wide[0], wide[1], None, wide[3]), dtype)
    close(ops.linear(x, weight, bias, residual.clone()), reference.linear(*wide), dtype)
    close(ops.norm_linear(x, norm, weight), reference.norm_linear(wide[0], wide_norm, wide[1]), dtype)
    close(ops.norm_linear(x, norm, weight, bias), reference.norm_linear(wide[0], wide_norm, wide[1], wide[2]), dtype)
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for activation in activations:
        gated = ops.norm_gated_linear(x, norm, weight, bias, activation=activation)
        want = reference.norm_gated_linear(wide[0], wide_norm, wide[1], wide[2], activation=activation)
        close(gated, want, dtype)
    wide_weight = Norm(torch.randn(size, device="cuda"), 1e-6)  # float32, as of Gemma's norms
    in_double = Norm(wide_weight.weight.double(), 1e-6)
    close(ops.rms_norm(x, wide_weight), reference.rms_norm(wide[0], in_double), dtype)
    close(ops.norm_linear(x, wide_weight, weight), reference.norm_linear(wide[0], in_double, wide[1]), dtype)
    gated = ops.norm_gated_linear(x, wide_weight, weight, activation="silu")
    close(gated, reference.norm_gated_linear(wide[0], in_double, wide[1], activation="silu"), dtype)


@pytest.mark.parametrize("num_sms", [78, 114, 132, 148])
def test_products_are_divided_for_any_number_of_multiprocessors(num_sms: int) -> None:
    """No block has more than 256 rows of a weight, and one wave of blocks has all rows if this limit allows it."""
    from minisgl.kernel.gemm.small_batch_gemm import choose_tiling

    for width, size, gate in [(4096, 1024, None), (7168, 5120, None), (5120, 17408, None), (34816, 5120, "silu")]:
        tiling = choose_tiling(torch.bfloat16, 64, width, size, num_sms, gate=gate, before_attention=False)
        assert 32 <= tiling.block_n <= 256
        assert tiling.stages >= 2
        if width * size > 1 << 23:
            assert tiling.block_n >= 128 or -(-width // tiling.block_n) * tiling.split <= num_sms * tiling.blocks


@pytest.mark.parametrize(
    ("width", "size", "cluster", "stages"),
    [
        *[(6144, 4096, 4, 5), (4096, 4096, 8, 4), (24576, 4096, 2, 7), (4096, 12288, 8, 4)],  # Qwen3-8B
        *[(7168, 5120, 4, 5), (5120, 5120, 4, 7), (34816, 5120, 2, 7), (5120, 17408, 4, 7)],  # Qwen3-14B
        *[(8192, 3840, 4, 4), (3840, 4096, 8, 4), (30720, 3840, 4, 7), (3840, 15360, 8, 4)],  # Gemma-3-12B
        *[(12352, 4096, 2, 7), (28672, 4096, 4, 7), (3584, 5120, 8, 5), (248320, 4096, 2, 7)],
    ],
)
def test_products_of_a_row_are_divided_as_measured_on_an_h200(width: int, size: int, cluster: int, stages: int) -> None:
    from minisgl.kernel.gemm.skinny_gemm import Gpu, choose_tiling

    h200 = Gpu(num_sms=132, has_clusters=True, ring_bytes=222 << 10)
    tiling = choose_tiling(h200, torch.bfloat16, 1, width, size, norm=True)
    assert (tiling.block_n, tiling.cluster, tiling.stages) == (64, cluster, stages)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 9, 17, 65])
def test_outliers_are_normed_before_they_are_multiplied(ops: Ops, dtype: torch.dtype, rows: int) -> None:
    """Some models have states of several thousand in the first token; times the norm's weight they overflow float16."""
    x = torch.randn(rows, 1024, device="cuda").to(dtype)
    x[0, 7] = 15_000
    weight = (torch.randn(4096, 1024, device="cuda") / 32).to(dtype)
    norm = Norm((torch.rand(1024, device="cuda") * 2 + 4).to(dtype), 1e-6)
    wide, wide_norm, reference = (x.double(), weight.double()), Norm(norm.weight.double(), norm.eps), TorchOps()
    close(ops.norm_linear(x, norm, weight), reference.norm_linear(wide[0], wide_norm, wide[1]), dtype)
    have = ops.norm_gated_linear(x, norm, weight, activation="silu")
    close(have, reference.norm_gated_linear(wide[0], wide_norm, wide[1], activation="silu"), dtype)


@pytest.mark.parametrize("rows", [4, 24, 64])
@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
def test_products_follow_one_another_in_a_graph(ops: Ops, rows: int, norm_dtype: torch.dtype) -> None:
    """Kernels begin before their predecessors end: the same bits as one at a time, at every replay."""
    shapes = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
    weights = {name: (torch.randn(shape, device="cuda") / shape[1] ** 0.5).bfloat16() for name, shape in shapes.items()}
    norm = Norm(torch.randn(1024, device="cuda").to(norm_dtype), 1e-6)
    start = torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16)

    def layers(pause: Callable[[], object]) -> torch.Tensor:
        x = start.clone()
        for _ in range(6):
            pause()
            qkv = ops.norm_linear(x, norm, weights["qkv"])
            pause()
            attended = ops.activate(qkv[:, 2048:], qkv[:, :2048].contiguous(), "sigmoid")
            pause()
            x = ops.linear(attended, weights["o"], None, x)
            pause()
            hidden = ops.norm_gated_linear(x, norm, weights["gate_up"], activation="silu")
            pause()
            x = ops.linear(hidden, weights["down"], None, x)
        return x

    layers(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(lambda: None)
    for _ in range(20):
        start.normal_()
        expected = layers(torch.cuda.synchronize)
        graph.replay()
        assert torch.equal(out, expected)


def test_decode_inputs_and_embedding(ops: Ops) -> None:
    slots = torch.tensor([3, 0, 5, 5], device="cuda")
    tokens = torch.randint(0, 100, (6, 200), dtype=torch.int32, device="cuda")
    lengths = torch.tensor([1, 5, 7, 150, 2, 33], dtype=torch.int32, device="cuda")
    page_table = torch.randint(0, 99, (6, 13), dtype=torch.int32, device="cuda")
    have = ops.decode_inputs(slots, tokens, lengths, page_table, 16, pages=True)
    want = TorchOps().decode_inputs(slots, tokens, lengths, page_table, 16, pages=True)
    for mine, reference in zip(have[:4], want[:4], strict=True):
        assert mine.dtype == reference.dtype
        assert torch.equal(mine, reference)
    for row, length in enumerate(want.kv_lens.tolist()):
        used = -(-length // 16)
        assert torch.equal(have.page_table[row, :used], want.page_table[row, :used])
    weight = torch.randn(100, 1024, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(ops.embed(have.input_ids, weight), weight[have.input_ids])
    first, last = int(have.input_ids.min()) + 1, int(have.input_ids.max())
    divided = ops.embed(have.input_ids, weight[first:last], first)
    assert torch.equal(divided, TorchOps().embed(have.input_ids, weight[first:last], first))
    assert divided.count_nonzero() < weight[have.input_ids].count_nonzero()


@pytest.mark.parametrize("count", [0, 1, 255, 257, 1000])
def test_tokens_are_read_after_the_kernels_that_write_them(count: int) -> None:
    """Pinned memory has the tokens once the stream has executed the copy, and nothing else is written."""
    from minisgl.engine.queue import token_copier

    memory = torch.full((1024,), -1, dtype=torch.int32, pin_memory=True)
    tokens = torch.zeros(count, dtype=torch.int32, device="cuda")
    torch.cuda._sleep(10_000_000)  # some milliseconds
    tokens.copy_(torch.arange(count, device="cuda"))
    token_copier(tokens.device)(tokens, memory)
    torch.cuda.synchronize()
    assert memory[:count].tolist() == list(range(count))
    assert bool((memory[count:] == -1).all())

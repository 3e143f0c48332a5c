"""Time of each CUDA kernel, the bytes that it must move, and the share of memory bandwidth that it reaches.

Times are of graph replays, so launches from Python do not count; work that cannot be captured is timed as it runs.
Inputs that a step finds in DRAM are rotated so that the L2 cache does not hold them. The memory bandwidth is that of a
large copy in the same run.

    python benchmark/kernel_times.py
    python benchmark/kernel_times.py --only sampling
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from measuring.arguments import check_gpus, make_parser
from measuring.report import table
from measuring.shapes import SHAPES
from minisgl.attention.backends.page_kernels import PageList, PageUpcaster, flatten_pages, make_flattener
from minisgl.attention.base import AttentionSpec
from minisgl.engine.sampling.sampler import Sampler, TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.base import Heads, Mixture, Norm, Ops, Routing, Weight
from minisgl.kernel.torch_ops import TorchOps, activate_and_mul
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import Kind, LevelFormat, Levels
from minisgl.sampling_params import SamplingFlags, SamplingParams

if TYPE_CHECKING:  # needs CUDA's packages
    from minisgl.kernel.cuda_ops import CudaOps

DEVICE = torch.device("cuda", 0)
HEAD_DIM = 128  # size of a head in all shapes
FORMS = {
    "fp8": LevelFormat("fp8"),
    "fp8 blocks": LevelFormat("fp8", 128),
    "fp8 blocks, x in fp8": LevelFormat("fp8", 128, rounds_x=True),
    "int4": LevelFormat("int4", 128, zeros=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table. `run(i)` launches the work once, on the i-th of its rotated inputs."""

    kernel: str
    shape: str
    run: Callable[[int], object]
    bytes: int  # bytes that must be read and written
    captured: bool = True


def microseconds(case: Case, calls: int) -> float:
    """Return the time of one call: the median of nine runs of `calls` calls."""
    for index in range(3):
        case.run(index)
    replay: Callable[[], object]
    if case.captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(calls):
                case.run(index)
        replay = graph.replay
    else:

        def replay() -> None:
            for index in range(calls):
                case.run(index)

    replay()
    times: list[float] = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times)[4]


def copy_speed() -> float:
    """Return bytes a microsecond, read and written, of a copy of 1 GiB."""
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    case = Case("copy", "1 GiB", lambda _: torch.neg(source, out=target), 2 * source.nbytes)
    return case.bytes / microseconds(case, 10)


def cuda_ops() -> CudaOps:
    from minisgl.kernel.cuda_ops import CudaOps  # needs CUDA's packages

    return CudaOps(DEVICE)


def _peaked_logits(rows: int, vocab: int) -> torch.Tensor:
    """Return logits like those of a trained model: a few large ones, and all others far below."""
    logits = torch.randn(rows, vocab, device=DEVICE) * 2.5
    top = torch.randint(vocab, (rows, 30), device=DEVICE)
    return logits.scatter_(1, top, 22 - 4 * torch.rand(rows, 30, device=DEVICE) ** 0.5 * 2).to(torch.bfloat16)


def sampling() -> Iterator[Case]:
    """Time sampling from bfloat16 logits of Qwen3's vocabulary. `flat`: normal, so the nucleus is most of it."""
    vocab = 151936
    kinds = {
        "greedy": (0.0, 0, 1.0),
        "plain": (0.6, 0, 1.0),
        "top-k 20, top-p 0.95": (0.6, 20, 0.95),
        "top-p 0.9": (1.0, 0, 0.9),
        "masked": (0.6, 20, 0.95),
        "penalties": (0.6, 20, 0.95),
    }
    from minisgl.engine.sampling.cuda_sampler import CudaSampler  # needs CUDA's packages

    samplers: dict[str, Sampler] = {"csrc": CudaSampler(DEVICE), "torch": TorchSampler()}
    for rows in (1, 64, 256):
        for spread, logits in (
            ("peaked", _peaked_logits(rows, vocab)),
            ("flat", torch.randn(rows, vocab, device=DEVICE).to(torch.bfloat16)),
        ):
            slots = torch.arange(rows, device=DEVICE)
            state = SlotState(num_slots=rows, max_seq_len=8192, page_size=64, scratch_page=0, device=DEVICE)
            for kind, (temperature, top_k, top_p) in kinds.items():
                for name, sampler in samplers.items():
                    if name == "torch" and spread == "flat":
                        continue  # its work does not depend on the logits
                    state.temperature[:], state.top_k[:], state.top_p[:] = temperature, top_k, top_p
                    state.lengths[:] = 1000
                    state.processing.presence_penalty[:] = 0.5
                    penalty = 0.5 if kind == "penalties" else 0.0
                    params = SamplingParams(temperature, top_k, top_p, presence_penalty=penalty)
                    mask = None
                    if kind == "masked":
                        mask = torch.randint(-(2**31), 2**31, (rows, vocab // 32), device=DEVICE).int()

                    def run(
                        _: int,
                        sampler: Sampler = sampler,
                        flags: SamplingFlags = params.flags,
                        logits: torch.Tensor = logits,
                        slots: torch.Tensor = slots,
                        state: SlotState = state,
                        mask: torch.Tensor | None = mask,
                    ) -> object:
                        return sampler.sample(logits, slots, state, flags, mask)

                    yield Case(f"sample ({name})", f"{rows} rows, {kind}, {spread}", run, logits.numel() * 2)


def moe() -> Iterator[Case]:
    """Time the experts of a layer of Qwen3-30B-A3B. Bytes: the chosen experts' weights, tokens in and out."""
    hidden, intermediate, experts, top_k = 2048, 768, 128, 8
    layers = [
        Mixture(
            (torch.randn(experts, 2 * intermediate, hidden, device=DEVICE) * hidden**-0.5).to(torch.bfloat16),
            (torch.randn(experts, hidden, intermediate, device=DEVICE) * intermediate**-0.5).to(torch.bfloat16),
            experts,
            Routing(top_k, renormalize=True),
        )
        for _ in range(2)
    ]
    all_ops: dict[str, Ops] = {"csrc": cuda_ops(), "torch": TorchOps()}
    for tokens in (1, 8, 64, 256, 512, 4096):
        x = torch.randn(tokens, hidden, device=DEVICE).to(torch.bfloat16)
        scores = [torch.randn(tokens, experts, device=DEVICE).to(torch.bfloat16) for _ in range(8)]
        touched = [torch.unique(score.topk(top_k).indices).numel() for score in scores]
        weights = 3 * hidden * intermediate * 2 * sum(touched) / len(touched)
        for name, ops in all_ops.items():

            def run(
                index: int, ops: Ops = ops, x: torch.Tensor = x, scores: list[torch.Tensor] = scores
            ) -> torch.Tensor:
                return ops.moe(x, scores[index % 8], layers[index % 2])

            captured = ops.moe_graph_safe(layers[0])
            yield Case(f"moe ({name})", f"{tokens} tokens", run, int(weights) + 2 * x.numel() * 2, captured)


def products() -> Iterator[Case]:
    """Time the products of a layer, with norm, gate and residual. Bytes are those of weights and of rows in and out."""
    layers = {"Qwen3-0.6B": (1024, 2048, 4096, 3072), "Qwen3-14B": (5120, 5120, 7168, 17408)}
    all_ops: dict[str, Ops] = {"csrc": cuda_ops(), "torch": TorchOps()}
    for model, (hidden, attended, qkv, intermediate) in layers.items():
        for label, outputs, size in (
            ("qkv", qkv, hidden),
            ("o", hidden, attended),
            ("gate and up", 2 * intermediate, hidden),
            ("down", hidden, intermediate),
        ):
            copies = max(2, (200 << 20) // (outputs * size * 2))
            weights = torch.randn(copies, outputs, size, device=DEVICE, dtype=torch.bfloat16) * size**-0.5
            norm = Norm(torch.ones(size, device=DEVICE, dtype=torch.bfloat16), 1e-6)
            for rows in (1, 16, 32, 64, 128, 256):
                x = torch.randn(rows, size, device=DEVICE).to(torch.bfloat16)
                residual = torch.randn(rows, outputs, device=DEVICE).to(torch.bfloat16)
                for name, ops in all_ops.items():

                    def run(
                        index: int,
                        ops: Ops = ops,
                        label: str = label,
                        x: torch.Tensor = x,
                        residual: torch.Tensor = residual,
                        weights: torch.Tensor = weights,
                        norm: Norm = norm,
                    ) -> torch.Tensor:
                        weight = weights[index % len(weights)]
                        if label == "qkv":
                            return ops.norm_linear(x, norm, weight)
                        if label == "gate and up":
                            return ops.norm_gated_linear(x, norm, weight, activation="silu")
                        return ops.linear(x, weight, None, residual)

                    moved = outputs * size * 2 + x.nbytes + residual.nbytes
                    yield Case(f"{label} ({name})", f"{model}, {rows} rows", run, moved)


def quantized() -> Iterator[Case]:
    """Time the products of a layer of Qwen3-8B with quantized weights, with norm, gate and residual."""
    ops = cuda_ops()
    norm = Norm(torch.ones(4096, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    layer = (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate and up", 24576, 4096), ("down", 4096, 12288))
    for label, outputs, size in layer:
        for name, form in FORMS.items():
            copies = max(2, (200 << 20) // (outputs * size))
            weights = [_random_weight(ops, form, outputs, size, gated=label == "gate and up") for _ in range(copies)]
            for rows in (1, 16, 64, 128, 256, 2048):
                x = torch.randn(rows, size, device=DEVICE).to(torch.bfloat16)
                residual = torch.randn(rows, outputs, device=DEVICE).to(torch.bfloat16)

                def run(
                    index: int,
                    label: str = label,
                    x: torch.Tensor = x,
                    residual: torch.Tensor = residual,
                    weights: list[Weight] = weights,
                ) -> torch.Tensor:
                    weight = weights[index % len(weights)]
                    if label == "qkv":
                        return weight.norm_linear(x, norm)
                    if label == "gate and up":
                        return weight.norm_gated_linear(x, norm, activation="silu")
                    return weight.linear(x, None, residual)

                moved = outputs * size // (2 if form.kind == "int4" else 1) + x.nbytes + residual.nbytes
                yield Case(f"{label} {name}", f"{rows} rows, Qwen3-8B", run, moved)


def quantized_layers() -> Iterator[Case]:
    """Time the products of whole layers in the order of a model, so that each begins while the one before it ends.

    Bytes are those of the weights without their scales.
    """
    ops = cuda_ops()
    for model in ("8b", "14b", "32b"):
        shape = SHAPES[model]
        attended, kept = (heads * HEAD_DIM for heads in (shape.heads, shape.kv_heads))
        sizes = (
            (attended + 2 * kept, shape.hidden),
            (shape.hidden, attended),
            (2 * shape.intermediate, shape.hidden),
            (shape.hidden, shape.intermediate),
        )
        values = sum(outputs * size for outputs, size in sizes)
        norm = Norm(torch.ones(shape.hidden, device=DEVICE, dtype=torch.bfloat16), 1e-6)
        for name, form in FORMS.items():
            weights = values // (2 if form.kind == "int4" else 1)
            layers = [
                [_random_weight(ops, form, *each, gated=index == 2) for index, each in enumerate(sizes)]
                for _ in range(max(2, (400 << 20) // weights))
            ]
            for rows in (1, 8, 16, 64, 128, 256):
                x, y = (torch.randn(rows, size, device=DEVICE).to(torch.bfloat16) for size in (shape.hidden, attended))

                def run(
                    index: int,
                    layers: list[list[Weight]] = layers,
                    x: torch.Tensor = x,
                    y: torch.Tensor = y,
                    norm: Norm = norm,
                ) -> torch.Tensor:
                    qkv, o, gate_up, down = layers[index % len(layers)]
                    qkv.norm_linear(x, norm)
                    residual = o.linear(y, None, x)
                    return down.linear(gate_up.norm_gated_linear(residual, norm, activation="silu"), None, residual)

                yield Case(f"layer {name}", f"{rows} rows, Qwen3-{model}", run, weights)


def _random_weight(ops: Ops, form: LevelFormat, outputs: int, size: int, *, gated: bool) -> Weight:
    levels = Levels.empty(form, torch.Size((outputs, size)), DEVICE)
    levels.codes.random_(0, 16 if form.kind == "int4" else 120)
    levels.scales.fill_(1e-3)
    if levels.zeros is not None:
        levels.zeros.fill_(8)
    return ops.bind_levels(levels, torch.bfloat16, gated=gated)


def same_each_time(work: Callable[..., object], *args: object, **options: object) -> Callable[[int], object]:
    """Return the `run` of a case whose inputs are not rotated."""
    return lambda _: work(*args, **options)


def experts() -> Iterator[Case]:
    """Time quantized experts of a layer. Bytes: the chosen experts' weights, tokens in and out."""
    ops = cuda_ops()
    layers: tuple[tuple[str, Kind, int, int, int, int, int], ...] = (
        ("gpt-oss-20b", "mxfp4", 32, 32, 4, 2880, 2880),
        ("Qwen3-30B-A3B", "fp8", 128, 128, 8, 2048, 768),
        ("Qwen3-30B-A3B", "int4", 128, 128, 8, 2048, 768),
    )
    for model, kind, group, count, top_k, hidden, intermediate in layers:
        form = LevelFormat(kind, group)
        shapes = (((count, 2 * intermediate, hidden), True), ((count, hidden, intermediate), False))
        packed = [PackedExperts.empty(form, shape, torch.bfloat16, DEVICE, gated=gated) for shape, gated in shapes]
        for each in packed:
            each.words.random_(-(2**31), 2**31 - 1)
            each.scales.fill_(240 if kind == "mxfp4" else 0x3A800008)  # 2^-13; 2^-10, and the zero point 8
        mixture = Mixture(packed[0], packed[1], count, Routing(top_k, renormalize=True))
        for tokens in (1, 8, 64, 256, 2048):
            x = torch.randn(tokens, hidden, device=DEVICE).to(torch.bfloat16)
            scores = [torch.rand(tokens, count, device=DEVICE).to(torch.bfloat16) for _ in range(8)]
            touched = sum(torch.unique(score.topk(top_k).indices).numel() for score in scores) / len(scores)
            weights = sum(each.nbytes for each in packed) * touched / count

            def run(
                index: int,
                x: torch.Tensor = x,
                scores: list[torch.Tensor] = scores,
                mixture: Mixture = mixture,
            ) -> torch.Tensor:
                return ops.moe(x, scores[index % 8], mixture)

            yield Case(f"experts in {kind}", f"{tokens} tokens, {model}", run, int(weights) + 2 * x.nbytes)


def between() -> Iterator[Case]:
    """Time the kernels between products and attention. A few tokens are in the L2 cache, as they are in a step."""
    csrc = cuda_ops()
    all_ops: dict[str, tuple[Ops, Callable[..., object]]] = {
        "csrc": (csrc, csrc.activate_and_mul),
        "torch": (TorchOps(), activate_and_mul),
    }
    models = {"Qwen3-0.6B": (1024, 16, 3072), "Qwen3-14B": (5120, 40, 17408)}
    context, vocab = 4096, 151936
    for model, (hidden, num_heads, intermediate) in models.items():
        spec = AttentionSpec(num_heads, 8, 128, 64, torch.bfloat16)
        pool = KVPool(KVLayout(spec.page_size, (spec.kv_stores(),)), 256, DEVICE)
        norm, head_norm = (Norm(torch.ones(n, device=DEVICE).to(spec.dtype), 1e-6) for n in (hidden, spec.head_dim))
        cos_sin = torch.rand(context, spec.head_dim, device=DEVICE)
        heads = Heads(num_heads, spec.num_kv_heads, cos_sin, head_norm, head_norm)
        embedding = torch.randn(vocab, hidden, device=DEVICE).to(spec.dtype)
        for tokens in (1, 64, 256, 8192):
            x, qkv, gate_up = (
                torch.randn(tokens, width, device=DEVICE).to(spec.dtype)
                for width in (hidden, (num_heads + 2 * spec.num_kv_heads) * spec.head_dim, 2 * intermediate)
            )
            ids = torch.randint(vocab, (tokens,), device=DEVICE)
            positions = torch.randint(context, (tokens,), device=DEVICE)
            places = torch.randperm(pool.num_pages * pool.page_size, device=DEVICE)[:tokens]
            stored = qkv, heads, positions, places, pool.keys(0), pool.values(0)
            angles = tokens * cos_sin[0].nbytes
            for name, (which, activate) in all_ops.items():
                for kernel, run, moved in (
                    ("norm", same_each_time(which.rms_norm, x, norm), 2 * x.nbytes),
                    ("norm, rope, store", same_each_time(which.norm_rope_store, *stored), 2 * qkv.nbytes + angles),
                    ("silu and product", same_each_time(activate, gate_up, "silu"), gate_up.nbytes * 3 // 2),
                    ("embedding", same_each_time(which.embed, ids, embedding), 2 * x.nbytes),
                ):
                    yield Case(f"{kernel} ({name})", f"{model}, {tokens} tokens", run, moved)


def pages() -> Iterator[Case]:
    """Time page metadata of a step, and the upcast of FP8 pages for a backend that reads 16 bits."""
    all_ops: dict[str, tuple[Ops, Callable[..., object]]] = {
        "csrc": (cuda_ops(), make_flattener(DEVICE)),
        "torch": (TorchOps(), flatten_pages),
    }
    spec = AttentionSpec(16, 8, 128, 64, torch.bfloat16, fp8_kv=True)
    context = 2048
    for rows in (1, 64, 256):
        state = SlotState(num_slots=rows, max_seq_len=context, page_size=spec.page_size, scratch_page=0, device=DEVICE)
        state.lengths[:] = context
        slots, table, kv_lens = torch.arange(rows, device=DEVICE), state.page_table[:rows], state.lengths[:rows]
        inputs = slots, state.tokens, state.lengths, state.page_table, spec.page_size
        page_list = PageList.empty(rows, table.shape[1], DEVICE)
        in_rows = 4 * slots.nbytes + 2 * kv_lens.nbytes  # slots, ids, positions, places; tokens and lengths
        for name, (which, flatten) in all_ops.items():
            run = same_each_time(which.decode_inputs, *inputs, pages=True)
            yield Case(f"decode inputs ({name})", f"{rows} rows", run, 2 * table.nbytes + in_rows)
            run = same_each_time(flatten, table, kv_lens, spec.page_size, page_list)
            yield Case(f"pages as a list ({name})", f"{rows} rows", run, 2 * table.nbytes)
    layout = KVLayout(spec.page_size, (spec.kv_stores(),), spec.kv_stores(spec.dtype))
    pool = KVPool(layout, 128, DEVICE)
    upcaster = PageUpcaster(spec, DEVICE)
    for count in (16, 128):
        starts, last_page_lens = torch.tensor([[0, count], [spec.page_size, 0]], device=DEVICE).int()
        seen = PageList(starts, last_page_lens[:1], torch.arange(count, device=DEVICE).int())
        moved = 2 * count * pool.keys(0)[0].numel() * (spec.kv_dtype.itemsize + spec.dtype.itemsize)
        run = same_each_time(upcaster.upcast, 0, pool, seen)
        yield Case("pages upcast (csrc)", f"{count} pages of {spec.page_size} tokens, 8 KV heads", run, moved)


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "sampling": sampling,
    "moe": moe,
    "products": products,
    "quantized": quantized,
    "layers": quantized_layers,
    "experts": experts,
    "between": between,
    "pages": pages,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=SUITES, help="suite to measure instead of all")
    parser.add_argument("--calls", type=int, default=20, metavar="N", help="calls in one graph")
    args = parser.parse_args()
    check_gpus()
    torch.manual_seed(0)
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}: a copy moves {speed / 1e6:.2f} TB/s")
    for name, suite in SUITES.items():
        if args.only in (None, name):
            lines = []
            for case in suite():
                time = microseconds(case, args.calls)
                share = case.bytes / time / speed
                lines.append([case.kernel, case.shape, f"{time:.1f}", f"{case.bytes / 1e6:.1f}", f"{share:.0%}"])
            print(table(["kernel", "shape", "us", "MB", "of the copy's speed"], lines), flush=True)


if __name__ == "__main__":
    main()

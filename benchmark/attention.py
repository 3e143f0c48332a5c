"""Comparison of attention backends: decodes by the share of memory bandwidth, prefills by operations a second, and the
host's time for FlashInfer's planning.

Decodes are timed in CUDA graphs, over so many layers that the KV cache does not fit into the L2 cache. `fused` also
norms, rotates and stores, which the others leave to another kernel.

    python benchmark/attention.py
    python benchmark/attention.py --decode 64x640 256x100-2000 --heads 16,8 --page-size 64 --only decode
    python benchmark/attention.py --kv-cache-dtype fp8_e4m3
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch

from kernel_times import DEVICE, Case, copy_speed, microseconds
from measuring.arguments import check_gpus, make_parser
from measuring.report import table
from minisgl.attention.backend_choice import CANDIDATES, make_backend
from minisgl.attention.base import (
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    AttentionSpec,
    GraphedDecode,
    PlansDecodes,
)
from minisgl.attention.self_test import ROLES
from minisgl.config.engine import KVCacheDtype
from minisgl.core import Int32Array
from minisgl.kernel.base import Heads, Norm
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout

if TYPE_CHECKING:  # needs CUDA's packages
    from minisgl.attention.fused import FusedRows

DECODES = [
    *("1x640", "8x640", "64x640", "256x300", "256x840", "256x2000"),
    *("256x100-2000", "40x500-2000", "8x8000", "1x32000", "8x100-16000"),
]
HEADS = [(16, 8), (32, 8), (40, 8)]
PREFILLS = [(1, 8192, 0), (8, 1024, 0), (1, 2048, 16384), (64, 128, 900)]  # rows, new tokens, cached tokens


def names(spec: AttentionSpec) -> list[str]:
    """Return the backends that run here without compiling anything."""
    capability = torch.cuda.get_device_capability(DEVICE)
    return [
        name
        for name in ("fa", "fi", "fused")
        if CANDIDATES[name].unsupported(spec, capability) is None
        and all(CANDIDATES[name].ready(spec, capability, role) for role in ROLES)
    ]


def make_pool(spec: AttentionSpec, rows: int, context: int, layers: int) -> tuple[KVPool, torch.Tensor]:
    """Return random keys and values, and page tables [rows, pages] with random pages of the pool."""
    width = -(-context // spec.page_size)
    upcast = spec.kv_stores(spec.dtype) if spec.fp8_kv else ()
    layout = KVLayout(spec.page_size, (spec.kv_stores(),) * layers, upcast)
    pool = KVPool(layout, rows * width, DEVICE)
    random = torch.empty_like(pool.keys(0), dtype=spec.dtype)
    for layer in range(layers):
        pool.keys(layer).copy_(random.normal_())
        pool.values(layer).copy_(random.normal_())
    return pool, torch.randperm(rows * width, device=DEVICE).int().view(rows, width)


def lengths_of(text: str) -> Int32Array:
    """Return cached tokens by row: for `64x640` 64 times 640, for `64x100-640` 64 lengths from 100 to 640."""
    rows, context = text.split("x")
    low, high = (context.split("-") * 2)[:2]
    return np.random.default_rng(0).integers(int(low), int(high) + 1, int(rows)).astype(np.int32)


def decodes(spec: AttentionSpec, text: str) -> Iterator[Case]:
    lengths = lengths_of(text)
    rows, context, head_dim = len(lengths), int(lengths.max()), spec.head_dim
    kv_bytes = int(lengths.sum()) * spec.num_kv_heads * head_dim * 2 * spec.kv_dtype.itemsize
    layers = min(max(-(-(300 << 20) // kv_bytes), 1), 32)
    pool, page_table = make_pool(spec, rows, context, layers)
    inputs = AttentionInputs(
        query_lens=np.ones(rows, dtype=np.int32),
        kv_lens=lengths,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
        kv_lens_device=torch.from_numpy(lengths).to(DEVICE),
        page_table=page_table,
    )
    qkv = torch.randn(rows, (spec.num_heads + 2 * spec.num_kv_heads) * head_dim, device=DEVICE).to(spec.dtype)
    q = qkv[:, : spec.num_heads * head_dim].reshape(rows, spec.num_heads, head_dim).contiguous()
    for name in names(spec):
        run: Callable[[int], object]
        if name == "fused":
            from minisgl.attention.fused import FusedDecode  # needs CUDA's packages

            norm = Norm(torch.ones(head_dim, dtype=spec.dtype, device=DEVICE), 1e-6)
            angles = torch.rand(context + 1, head_dim // 2, device=DEVICE)
            cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
            heads = Heads(spec.num_heads, spec.num_kv_heads, cos_sin, norm, norm)
            slots = torch.arange(rows, device=DEVICE)
            fused = FusedDecode([spec], DEVICE).rows(spec, slots, inputs.kv_lens_device, page_table)

            def run(index: int, fused: FusedRows = fused, heads: Heads = heads) -> object:
                layer = index % layers
                return fused.forward(qkv, heads, pool.keys(layer), pool.values(layer))

        else:
            backend = make_backend(name, spec, DEVICE)
            planner: AttentionBackend | GraphedDecode = backend
            if isinstance(backend, PlansDecodes):
                planner = graphed = backend.graphed_decode(rows)
                graphed.prepare(lengths - 1)
            run = partial(_forward, planner.plan(inputs), q, pool, layers)

        yield Case(name, text, run, kv_bytes)


def _forward(plan: AttentionPlan, q: torch.Tensor, pool: KVPool, layers: int, index: int) -> object:
    return plan.forward(index % layers, q, pool)


def prefills(spec: AttentionSpec, rows: int, new: int, cached: int) -> Iterator[tuple[str, float]]:
    """Yield name and TFLOP/s of each backend; a causal query counts the keys that it sees."""
    pool, page_table = make_pool(spec, rows, new + cached, 1)
    inputs = AttentionInputs(
        query_lens=np.full(rows, new, dtype=np.int32),
        kv_lens=np.full(rows, new + cached, dtype=np.int32),
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * new,
        kv_lens_device=torch.full((rows,), new + cached, dtype=torch.int32, device=DEVICE),
        page_table=page_table,
    )
    q = torch.randn(rows * new, spec.num_heads, spec.head_dim, device=DEVICE).to(spec.dtype)
    operations = 4.0 * rows * spec.num_heads * spec.head_dim * (new * cached + new * (new + 1) / 2)
    for name in names(spec):
        if name != "fused":
            plan = make_backend(name, spec, DEVICE).plan(inputs)
            case = Case(name, "", partial(_forward, plan, q, pool, 1), 0, captured=False)
            yield name, operations / microseconds(case, 20) / 1e6


def planning(spec: AttentionSpec, rows: int, context: int) -> tuple[float, float]:
    """Return host microseconds of FlashInfer's `prepare` for a replay, with a new plan and with a kept one.

    Nothing is replayed: a plan must fit the lengths on the device.
    """
    pool, page_table = make_pool(spec, rows, context + 200, 1)
    backend = make_backend("fi", spec, DEVICE)
    if not isinstance(backend, PlansDecodes):
        raise ValueError("FlashInfer plans captured decodes on the host")
    graphed = backend.graphed_decode(rows)
    lengths = np.full(rows, context, dtype=np.int32)
    graphed.prepare(lengths - 1)
    inputs = AttentionInputs(
        query_lens=np.ones_like(lengths),
        kv_lens=lengths,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
        kv_lens_device=torch.from_numpy(lengths).to(DEVICE),
        page_table=page_table,
    )
    q = torch.randn(rows, spec.num_heads, spec.head_dim, device=DEVICE).to(spec.dtype)
    graphed.plan(inputs).forward(0, q, pool)
    torch.cuda.synchronize()
    rng = np.random.default_rng(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(100):
        changed = rng.integers(1, context, rows).astype(np.int32)
        for new in (True, False):
            begin = time.perf_counter()
            graphed.prepare(changed)
            times[new].append((time.perf_counter() - begin) * 1e6)
    return float(np.median(times[True])), float(np.median(times[False]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--decode", nargs="*", default=DECODES, metavar="ROWSxCONTEXT[-LONGEST]", help="decodes to measure"
    )
    parser.add_argument(
        "--heads", nargs="*", default=[f"{q},{kv}" for q, kv in HEADS], metavar="QUERY,KV", help="numbers of heads"
    )
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="dimensions of a head")
    parser.add_argument("--page-size", type=int, default=64, metavar="TOKENS", help="tokens per page of the KV cache")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=get_args(KVCacheDtype), help="type of the stored K and V"
    )
    parser.add_argument("--only", choices=("decode", "prefill", "planning"), help="part to measure instead of all")
    args = parser.parse_args()
    check_gpus()
    torch.manual_seed(0)
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}: a copy moves {speed / 1e6:.2f} TB/s")
    print(f"pages of {args.page_size} tokens, KV cache {args.kv_cache_dtype}")
    specs = []
    for text in args.heads:
        heads, kv_heads = (int(part) for part in text.split(","))
        fp8 = args.kv_cache_dtype == "fp8_e4m3"
        specs.append(AttentionSpec(heads, kv_heads, args.head_dim, args.page_size, torch.bfloat16, fp8_kv=fp8))
    with torch.inference_mode():
        if args.only in (None, "decode"):
            print_decodes(specs, args.decode, speed)
        if args.only in (None, "prefill"):
            print_prefills(specs)
        if args.only in (None, "planning"):
            print_planning(specs)


def print_decodes(specs: list[AttentionSpec], decodes_of: list[str], speed: float) -> None:
    lines = []
    for spec in specs:
        for text in decodes_of:
            for case in decodes(spec, text):
                took = microseconds(case, 32)
                figures = [f"{took:.1f}", f"{case.bytes / took / 1e6:.2f}", f"{case.bytes / took / speed:.0%}"]
                lines.append([f"{spec.num_heads}/{spec.num_kv_heads} {case.shape}", case.kernel, *figures])
    print(table(["decode", "backend", "us", "TB/s", "of a copy"], lines), flush=True)


def print_prefills(specs: list[AttentionSpec]) -> None:
    lines = []
    for spec in specs:
        for rows, new, cached in PREFILLS:
            for name, speed_of in prefills(spec, rows, new, cached):
                what = f"{spec.num_heads}/{spec.num_kv_heads} {rows} x {new}, {cached} cached"
                lines.append([what, name, f"{speed_of:.0f}"])
    print(table(["prefill", "backend", "TFLOP/s"], lines), flush=True)


def print_planning(specs: list[AttentionSpec]) -> None:
    lines = []
    for spec in specs:
        if "fi" in names(spec):
            for rows in (1, 64, 256):
                planned, kept = planning(spec, rows, 840)
                what = f"{spec.num_heads}/{spec.num_kv_heads} {rows} rows"
                lines.append([what, f"{planned:.0f}", f"{kept:.0f}"])
    print(table(["FlashInfer's prepare, host", "us, new lengths", "us, plan kept"], lines), flush=True)


if __name__ == "__main__":
    main()

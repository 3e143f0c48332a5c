"""Choice of the steps to capture: padding stays small, and prefills only as far as their graphs pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from measuring.shapes import make_shape
from minisgl.distributed import SingleRank
from minisgl.engine.cuda_graphs.sizes import GraphSizes, decode_graph_sizes, prefill_graph_sizes
from minisgl.kernel.base import ClampedSwiGLU, ExpertKind, Routing
from minisgl.layers.layer_config import MLPConfig, MoEConfig
from minisgl.models.decoder import CausalLM
from minisgl.models.load_config import load_model_config
from minisgl.models.weights.loading import build_model

META = torch.device("meta")


@pytest.mark.parametrize("max_bs", [1, 2, 3, 7, 8, 100, 256, 300, 1000])
def test_decode_sizes(max_bs: int) -> None:
    sizes = decode_graph_sizes(max_bs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_bs
    assert all(above - size <= max(8, size // 8) for size, above in pairwise(sizes))


def meta_model(folder: Path, *, experts: MoEConfig | None = None) -> CausalLM:
    config = load_model_config(folder)
    if experts is not None:
        config = replace(config, layers=tuple(replace(layer, mlp=experts) for layer in config.layers))
    return build_model(config, tp=SingleRank(), dtype=torch.bfloat16, device=META)


def test_prefill_sizes_end_with_room_for_the_largest_step() -> None:
    sizes = prefill_graph_sizes(8192)
    assert sizes[-1] == 2048
    assert all(above - size <= max(64, size // 4) for size, above in pairwise(sizes))
    assert prefill_graph_sizes(300)[-1] == 320
    assert prefill_graph_sizes(1) == [64]


@pytest.mark.parametrize(
    ("useful", "largest"), [(1, 64), (64, 64), (65, 128), (1100, 1280), (1537, 1792), (2048, 1792)]
)
def test_prefills_that_keep_the_device_busy_without_graphs_have_none(useful: int, largest: int) -> None:
    sizes = GraphSizes(decode_graph_sizes(16), prefill_graph_sizes(1700))
    chosen = sizes.for_prefills(useful)
    assert chosen.decode == sizes.decode
    assert chosen.prefill == [size for size in sizes.prefill if size <= largest]


def test_experts_that_a_token_is_not_sent_to_do_not_count(tmp_path: Path) -> None:
    folder = make_shape("0.6b", tmp_path)
    dense, config = meta_model(folder), load_model_config(folder)
    dense_mlp = config.layers[0].mlp
    assert isinstance(dense_mlp, MLPConfig)
    half = dense_mlp.intermediate_size // 2
    # Two experts of half the size each: as many weights as the dense block's, and a router.
    sparse = meta_model(folder, experts=MoEConfig(16, half, Routing(2, renormalize=True)))
    assert sparse.layer_weights == dense.layer_weights + 16 * config.hidden_size


def test_the_products_of_a_model_are_known_before_its_weights(tmp_path: Path) -> None:
    """Kernels are compiled while weights are loaded, so (width, size, norm, gate) must be known before."""
    plain = {(4096, 1024, True, None), (1024, 2048, False, None), (1024, 3072, False, None), (151936, 1024, True, None)}
    dense = meta_model(make_shape("0.6b", tmp_path)).kernel_needs(torch.bfloat16)
    assert dense.products == {*plain, (6144, 1024, True, "silu")}
    assert (dense.head_dims, dense.norm_dtype, dense.experts) == ({128}, torch.bfloat16, frozenset())
    sparse = meta_model(make_shape("30b-a3b", tmp_path)).kernel_needs(torch.float8_e4m3fn)
    assert {(128, 2048, False, None), (5120, 2048, True, None)} <= sparse.products, "router; q, k and v"
    assert sparse.experts == {ExpertKind(128, 8, "silu")}
    clamped = meta_model(make_shape("gpt-oss-20b", tmp_path)).kernel_needs(torch.bfloat16)
    assert clamped.experts == {ExpertKind(32, 4, ClampedSwiGLU(1.702, 7.0))}

"""Experts that stay quantized when they are loaded: each rank's values, their memory, and which are dense instead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minisgl.distributed import SingleRank
from minisgl.layers.mlp import Experts, expert_labels
from minisgl.models.config.model_config import WeightError
from minisgl.models.load_config import load_model_config
from minisgl.models.weights.loading import LoadOptions, load_model
from minisgl.quantization.levels import LevelFormat
from minisgl.quantization.mxfp4 import Mxfp4Experts
from models.quantized import save_mxfp4, save_quantized
from models.test_model_tp import Rank
from models.test_online_quantization import Threads
from models.tiny import make_model
from support.expert_values import expert_values

CPU = torch.device("cpu")


def load(folder: Path, tp: Any, *, whole: bool = False, **options: Any) -> list[Experts]:
    """The experts of each layer, which stay quantized if they can."""
    given = {"keeps_experts": lambda *_: True, **options}
    config = load_model_config(folder)
    if whole:
        config = config.with_whole_experts()
    model = load_model(config, folder, LoadOptions(**given), tp=tp, dtype=torch.bfloat16, device=CPU)
    return [module for module in model.modules() if isinstance(module, Experts)]


def values(experts: Experts) -> tuple[Tensor, Tensor]:
    """Values of packed experts in the model's dtype, or dense ones."""
    if experts.packed is None:
        return experts.w13, experts.w2
    assert experts.w13.is_meta
    assert experts.w2.is_meta
    return expert_values(experts.packed[0]).bfloat16(), expert_values(experts.packed[1]).bfloat16()


def assert_same_experts(have: list[Experts], want: list[Experts]) -> None:
    for each, dense in zip(have, want, strict=True):
        assert dense.packed is None
        for packed, matrix in zip(values(each), values(dense), strict=True):
            assert torch.equal(packed, matrix)


@pytest.mark.parametrize(
    ("name", "sizes", "form"),
    [
        ("fp8 blocks of bf16", (1, 2), LevelFormat("fp8", 128)),
        ("awq", (1, 2, 4), LevelFormat("int4", 32, zeros=True)),
        ("fbgemm", (1, 2, 4), LevelFormat("fp8")),
    ],
)
def test_experts_have_the_values_of_the_checkpoint_on_every_rank(
    tmp_path: Path, name: str, sizes: tuple[int, ...], form: LevelFormat
) -> None:
    """Ranks whose columns end inside a block, those of four with blocks of 128, have dense experts unless whole.

    So have kernels that cannot read one of the two matrices, here the second, which has 256 outputs.
    """
    quantized, plain = save_quantized(tmp_path, "qwen3-moe", name, hidden_size=256, moe_intermediate_size=256)
    for size in (1, 2, 4):
        tp = SingleRank() if size == 1 else Rank(size - 1, size)
        experts = load(quantized, tp)
        assert [each.packed and each.packed[0].format for each in experts] == [form if size in sizes else None] * 2
        assert_same_experts(experts, load(plain, tp))
    tp = Rank(3, 4)
    experts = load(quantized, tp, whole=True)
    assert [each.packed and each.packed[0].format for each in experts] == [form] * 2
    assert [len(each.w2) for each in experts] == [2] * 2
    assert_same_experts(experts, load(plain, tp, whole=True))
    experts = load(quantized, SingleRank(), keeps_experts=lambda _, width, *__: width != 256)
    assert [each.packed for each in experts] == [None] * 2


def test_mxfp4_on_two_ranks(tmp_path: Path) -> None:
    """Gates and ups of gpt-oss interleave in the file; a rank's columns end inside a chunk of 64."""
    plain = save_mxfp4(tmp_path, hidden_size=64, intermediate_size=192, num_attention_heads=8, num_key_value_heads=4)
    for tp in (SingleRank(), Rank(0, 2), Rank(1, 2)):
        for layer, experts in enumerate(load(tmp_path, tp)):
            assert experts.packed is not None
            name = f"model.layers.{layer}.mlp.experts"
            share, gate_up = 192 // tp.size, plain[f"{name}.gate_up_proj"].transpose(1, 2)
            kept = slice(tp.rank * share, (tp.rank + 1) * share)
            w13, w2 = map(expert_values, experts.packed)
            assert torch.equal(w13, torch.cat((gate_up[:, 0::2][:, kept], gate_up[:, 1::2][:, kept]), dim=1))
            assert torch.equal(w2, plain[f"{name}.down_proj"].transpose(1, 2)[..., kept])
    assert all(experts.packed is None for experts in load(tmp_path, Rank(3, 4)))  # 48 columns cut a group of 32
    for part, experts in zip(load(tmp_path, Rank(3, 4), whole=True), load(tmp_path, SingleRank()), strict=True):
        for own, all_ in zip(values(part), values(experts), strict=True):
            assert torch.equal(own, all_[4:])


def test_experts_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a tensor holds: no copy of all of them is made beside what is kept."""
    save_mxfp4(tmp_path, hidden_size=64, intermediate_size=192)
    seen: list[int] = []
    read = Mxfp4Experts.expert_levels

    def counted(*args: Any) -> Any:
        levels = read(*args)
        seen.append(levels.codes.numel())
        return levels

    monkeypatch.setattr(Mxfp4Experts, "expert_levels", counted)
    monkeypatch.delattr(Mxfp4Experts, "read")
    experts = load(tmp_path, SingleRank())
    assert max(seen) <= experts[0].w13[0].numel()
    label = "in mxfp4 with groups of 32, multiplied in bfloat16 (csrc/quantized_moe.cu)"
    assert expert_labels(nn.ModuleList(experts)) == [f"the experts of {len(experts)} layers {label}"]


def test_scales_beyond_the_layout_are_refused_by_name(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, hidden_size=64, intermediate_size=64, largest_scale=130)
    with pytest.raises(WeightError, match=r"^model\.layers\.0\.mlp\.experts\.\w+_proj: a scale is [48], but"):
        load(tmp_path, SingleRank())


@pytest.mark.parametrize("keeps", [None, lambda *_: True])
def test_scales_that_are_not_numbers_are_refused_by_name(tmp_path: Path, keeps: Any) -> None:
    """The exponent 255, if the experts stay quantized and if they are dequantized."""
    save_mxfp4(tmp_path, hidden_size=64, intermediate_size=64)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"^model\.layers\.1\.mlp\.experts\.down_proj: .* not a number \(255\)"):
        load(tmp_path, SingleRank(), keeps_experts=keeps)


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_experts_that_are_rounded_stay_so(tmp_path: Path, method: str) -> None:
    """Their values equal rounded dense weights, on one rank and on two."""
    make_model("qwen3-moe", hidden_size=128, moe_intermediate_size=64).save_pretrained(tmp_path)
    dense = load(tmp_path, SingleRank(), quantization=method, keeps_experts=None)
    packed = load(tmp_path, SingleRank(), quantization=method)
    assert all(each.packed is not None and each.packed[0].format == LevelFormat(method) for each in packed)
    assert_same_experts(packed, dense)
    peers, barrier = [None, None], threading.Barrier(2)
    ranks = [Threads(rank, peers, barrier) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(lambda tp: load(tmp_path, tp, quantization=method), ranks))
        whole_ones = list(pool.map(lambda tp: load(tmp_path, tp, whole=True, quantization=method), ranks))
    for whole, *parts in zip(packed, *halves, strict=True):
        w13, w2 = values(whole)
        for rank, (rank_w13, rank_w2) in enumerate(map(values, parts)):
            kept = slice(rank * 32, (rank + 1) * 32)
            assert torch.equal(rank_w13, torch.cat((w13[:, :64][:, kept], w13[:, 64:][:, kept]), dim=1))
            assert torch.equal(rank_w2, w2[..., kept])
    for part, all_ in zip(whole_ones[1], packed, strict=True):
        assert all(torch.equal(own, each[3:]) for own, each in zip(values(part), values(all_), strict=True))


def test_dummy_experts_have_the_format_of_the_checkpoint(tmp_path: Path) -> None:
    """Their standard deviation is the config's, but for MXFP4 that of the nearest scale, a power of two."""
    (tmp_path / "mxfp4").mkdir()
    quantized, _ = save_quantized(
        tmp_path, "qwen3-moe", "fp8 blocks of bf16", hidden_size=256, moe_intermediate_size=128
    )
    save_mxfp4(tmp_path / "mxfp4", hidden_size=64, intermediate_size=64)
    for folder, form, error in (
        (quantized, LevelFormat("fp8", 128), 0.1),
        (tmp_path / "mxfp4", LevelFormat("mxfp4", 32), 0.5),
    ):
        config = load_model_config(folder)
        for experts in load(folder, SingleRank(), load_format="dummy"):
            assert experts.packed is not None
            assert experts.packed[0].format == form
            for matrix in values(experts):
                assert matrix.float().std() == pytest.approx(config.initializer_range, rel=error)

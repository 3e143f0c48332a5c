"""Rounding at load (--quantization): grids that hold exactly, alike on all ranks, and the products that read 4 bits."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import SingleRank
from minisgl.kernel.base import Activation, Norm
from minisgl.kernel.cpu.compile import CompilationError, load_library
from minisgl.kernel.cpu.int4 import TiledInt4Weight
from minisgl.kernel.cpu.weights import Int4Weight
from minisgl.kernel.cpu_ops import CpuOps, multiplies_bfloat16
from minisgl.kernel.torch_ops import TorchOps
from minisgl.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, bind_weights, product_labels
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config
from minisgl.models.weights.loading import LoadOptions, load_model
from minisgl.quantization import rounding
from minisgl.quantization.rounding import INT4_GROUP, largest_of_rows, levels_of_int4, round_to_8_bits, round_to_int4
from models.harness import Harness
from models.quantized import SHAPE, save_quantized
from models.test_logits import prompt
from models.test_model_tp import Rank
from models.test_model_weights import assert_same
from models.tiny import make_model

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDE = {**SHAPE, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 256}  # groups of 32 on 4 ranks


def load(folder: Path, tp: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    config, tp = load_model_config(folder), tp or SingleRank()
    return load_model(config, folder, LoadOptions(**options), tp=tp, dtype=dtype, device=CPU)


def random_weight(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((64, 160), generator=generator) * torch.rand((64, 1), generator=generator)
    weight[3, 32:64] = 0.0
    weight[4, :64] = weight[4, :64].abs() + 1.0  # no zero between the least and the largest
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_values_are_on_their_grid_in_every_dtype(dtype: torch.dtype) -> None:
    weight = random_weight(dtype)
    rounded = weight.clone()
    grid = round_to_int4(rounded)
    levels = grid.levels(rounded)
    assert (levels.min(), levels.max()) == (0, 15)
    assert grid.scales.dtype == grid.offsets.dtype == torch.bfloat16
    scales, offsets = (table.float().repeat_interleave(INT4_GROUP, 1) for table in (grid.scales, grid.offsets))
    assert torch.equal(((levels - 8) * scales + offsets).to(dtype), rounded)
    assert torch.equal(levels_of_int4(weight).dequantize().to(dtype), rounded), "the levels have the same values"
    assert ((rounded.float() - weight.float()).abs() <= 0.6 * scales + 2.0**-8 * weight.float().abs()).all()
    assert (rounded.float() - weight.float()).norm() < 0.085 * weight.float().norm()
    again = rounded.clone()
    round_to_int4(again)
    assert (again.float() - rounded.float()).norm() < 0.01 * weight.float().norm(), "a grid is found again"


def test_int4_of_a_narrow_range_far_from_zero() -> None:
    """bfloat16 moves the offset by several steps, so some values are outside of the grid. They get its ends."""
    weight = torch.rand((8, 64), generator=torch.Generator().manual_seed(0))
    weight += torch.linspace(100, 101, 8).unsqueeze(1)
    levels = levels_of_int4(weight)
    assert levels.codes.max() <= 15
    assert (levels.dequantize() - weight).abs().max() < 100 * 2.0**-8


def test_rows_are_rounded_alike_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = random_weight(torch.bfloat16), random_weight(torch.bfloat16)
    grid = round_to_int4(whole)
    largest = largest_of_rows(whole)
    monkeypatch.setattr(rounding, "_BLOCK", 7 * 160)
    by_chunk = round_to_int4(cut)
    assert torch.equal(whole, cut)
    assert torch.equal(grid.levels(whole), by_chunk.levels(cut))
    assert torch.equal(largest, largest_of_rows(cut))


@pytest.mark.parametrize(("method", "error"), [("fp8", 1 / 16), ("int8", 0.5 / 127)])
def test_8_bits_keep_the_largest_of_a_row(method: Any, error: float) -> None:
    weight = random_weight(torch.float32)
    rounded = weight.clone()
    round_to_8_bits(rounded, method, largest := largest_of_rows(weight))
    assert torch.allclose(rounded.abs().amax(1, keepdim=True), largest)
    bound = weight.abs() * error + largest * 2.0**-17 if method == "fp8" else largest * error * 1.001
    assert ((rounded - weight).abs() <= bound).all()
    assert max(len(row.unique()) for row in rounded / largest) <= 255


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_products_of_few_rows_read_4_bits(dtype: torch.dtype, rows: int) -> None:
    ops = CpuOps(bfloat16_products=multiplies_bfloat16())
    weight = random_weight(dtype)
    grid = round_to_int4(weight)
    bound = ops.bind(weight, grid)
    compiles = torch.cpu.get_capabilities().get("avx512_bf16") and shutil.which("g++")
    assert isinstance(bound, TiledInt4Weight if dtype == torch.bfloat16 and compiles else Int4Weight)
    x, bias, residual = (torch.randn(shape).to(dtype) for shape in ((rows, 160), (64,), (rows, 64)))
    norm = Norm(torch.rand(160).to(dtype), 1e-6)
    dense = ops.bind(weight)
    for have, want in (
        (bound.linear(x), dense.linear(x)),
        (bound.linear(x, bias, residual.clone()), dense.linear(x, bias, residual.clone())),
        (bound.norm_linear(x, norm, bias), dense.norm_linear(x, norm, bias)),
        *(
            (
                bound.norm_gated_linear(x, one, bias, activation=activation),
                dense.norm_gated_linear(x, one, bias, activation=activation),
            )
            for one in (norm, None, Norm(norm.weight.float(), 1e-6))
            for activation in get_args(Activation)
        ),
    ):
        assert (have - want).abs().max() <= 16 * torch.finfo(dtype).eps * want.abs().max()
    assert isinstance(ops.bind(weight[:-1], grid), type(dense)), "16 outputs are packed together"


def test_without_a_compiler_torch_multiplies_few_rows_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = random_weight(torch.bfloat16)
    grid = round_to_int4(weight)
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho error: no such option >&2\nexit 3\n")
    broken.chmod(0o755)
    capable = torch.cpu.get_capabilities().get("avx512_bf16")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler, reason in (
        ("nothing-here", "there is no C++ compiler"),
        (str(broken), "fails with 3: error: no such"),
    ):
        monkeypatch.setenv("CXX", compiler)
        ops = CpuOps(bfloat16_products=multiplies_bfloat16())
        assert [type(ops.bind(weight, grid)) for _ in range(2)] == [Int4Weight] * 2
        if capable:
            assert caplog.text.count(reason) == 1
    assert [file.name for file in tmp_path.rglob("*.so")] == []


def test_a_broken_library_in_the_cache_is_compiled_again(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    environ = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}

    def compile_to(file: Path) -> ctypes.CDLL:
        compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {file} "$2"\n')
        compiler.chmod(0o755)
        return load_library("int4_cpu.cpp", environ=environ)

    with pytest.raises(CompilationError, match="cannot be compiled or loaded"):
        compile_to(compiler)
    assert compile_to(Path(msgspec._core.__file__))


def test_a_library_is_on_the_disk_before_it_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power a part of one would kill each process that loads it, by SIGBUS."""
    cached: list[int] = []

    def sync(_: int) -> None:
        cached.append(len(list((tmp_path / "minisgl" / "cpu").glob("*.so"))))

    monkeypatch.setattr(os, "fsync", sync)
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {msgspec._core.__file__} "$2"\n')
    compiler.chmod(0o755)
    load_library("int4_cpu.cpp", environ={"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)})
    assert cached == [0]


def test_without_a_home_folder_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user whom its system does not know."""

    def unknown(_: int) -> NoReturn:
        raise KeyError

    compiler = tmp_path / "g++"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(CompilationError, match="home"):
        load_library("int4_cpu.cpp", environ={"CXX": str(compiler)})


@pytest.mark.parametrize(("method", "head"), [("fp8", set()), ("int8", set()), ("int4", {"lm_head"})])
@pytest.mark.parametrize(("kind", "experts"), [("qwen3-tied", set()), ("qwen3-moe", {"experts"})])
def test_matrices_are_rounded_and_nothing_else(
    tmp_path: Path, kind: str, experts: set[str], method: Any, head: set[str]
) -> None:
    make_model(kind, **WIDE, moe_intermediate_size=64).save_pretrained(tmp_path)
    plain, rounded = (
        dict(load(tmp_path, quantization=name).named_parameters(remove_duplicate=False)) for name in ("auto", method)
    )
    changed = {name.split(".")[-2] for name in plain if not torch.equal(plain[name], rounded[name])}
    assert changed == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", *experts, *head}


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, peers: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.peers, self.barrier = rank, len(peers), peers, barrier

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.barrier.wait(10)
        self.peers[self.rank] = x
        self.barrier.wait(10)
        return torch.cat(self.peers, dim=-1)


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_levels_are_what_is_rounded_to(tmp_path: Path, method: Any) -> None:
    """A weight that stays quantized is rounded when it is filled, a dense one in the end: to the same values."""
    make_model("llama", **WIDE).save_pretrained(tmp_path)
    for options in ({}, {"load_format": "dummy"}):
        dense = load(tmp_path, quantization=method, **options)
        model = load(tmp_path, quantization=method, fp8_activations=True, keeps=lambda *_: True, **options)
        linears = [module for module in model.modules() if isinstance(module, ColumnParallelLinear | RowParallelLinear)]
        kept = [module.levels.format for module in linears if module.weight.is_meta and module.levels is not None]
        assert len(kept) == len(linears)
        assert {form.rounds_x for form in kept} == {method == "fp8"}, "activations are rounded with FP8 alone"
        for each in (model, dense):
            bind_weights(each, TorchOps())
        for have, want in zip(model.modules(), dense.modules(), strict=True):
            if isinstance(have, Linear) and isinstance(want, Linear):
                assert torch.equal(have.product.tensor, want.product.tensor)


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_ranks_round_as_one_does(tmp_path: Path, method: Any) -> None:
    plain, by_hand = tmp_path / "plain", tmp_path / "rounded"
    make_model("llama", **WIDE).save_pretrained(plain)
    shutil.copytree(plain, by_hand)
    tensors = load_file(plain / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight") or (name == "lm_head.weight" and method == "int4"):
            round_to_int4(weight) if method == "int4" else round_to_8_bits(weight, method, largest_of_rows(weight))
    save_file(tensors, by_hand / "model.safetensors")
    assert_same(load(plain, quantization=method), load(by_hand))
    for size in (2, 4):
        peers, barrier = [None] * size, threading.Barrier(size)
        ranks = [Threads(rank, peers, barrier) for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            models = list(pool.map(lambda tp: load(plain, tp, quantization=method), ranks))  # type: ignore[misc]
        for rank, model in enumerate(models):
            assert_same(model, load(by_hand, Rank(rank, size)))


def test_int4_on_the_cpu_answers_as_its_dense_values(tmp_path: Path) -> None:
    make_model("qwen3", **WIDE, vocab_size=208).save_pretrained(tmp_path)
    tokens = prompt(12)
    dense = Harness(load(tmp_path, quantization="int4"))
    want = dense.step([(dense.add(tokens), 12)], every_token=True)
    model = load(tmp_path, quantization="int4")
    harness = Harness(model, ops=CpuOps(bfloat16_products=False))
    assert product_labels(model) == "9 matrices in int4 up to 4 rows (torch's kernel), above float32"
    sequence = harness.add(tokens)
    steps = torch.cat([harness.step([(sequence, count)], every_token=True) for count in (7, 1, 3, 1)])
    assert (steps - want).abs().max() < 1e-4 * want.abs().max()


def test_weights_that_cannot_be_rounded_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("llama").save_pretrained(tmp_path / "narrow")
    with pytest.raises(UnsupportedModel, match=r"groups of 32 inputs, which do not divide the 72 of .*qkv_proj"):
        load(tmp_path / "narrow", quantization="int4")
    (tmp_path / "stored").mkdir()
    quantized, plain = save_quantized(tmp_path / "stored", "llama", "fp8 tensor")
    with pytest.raises(UnsupportedModel, match="--quantization int4: the checkpoint has weights of fp8 already"):
        load(quantized, quantization="int4")
    with caplog.at_level(logging.INFO, "minisgl"):
        assert_same(load(quantized, quantization="fp8"), load(plain))
        load(plain, quantization="int8")
    assert "matrices are rounded to int8 as they are loaded (a scale for each output) and kept" in caplog.text

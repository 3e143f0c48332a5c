"""Backends that fail a small step of known answers are not used; the toolkit that FlashInfer compiles with."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.attention import backend_choice
from minisgl.attention.backend_choice import Candidate, Chooser
from minisgl.attention.backends.cuda_home import arrange_wheels, find_cuda_home, find_wheels
from minisgl.attention.backends.torch_backend import TorchAttention, TorchPlan
from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.attention.self_test import Role, self_test_error

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.bfloat16)
WINDOWED = replace(SPEC, window=1000)


class BlindToWindows(TorchAttention):
    """Backend that ignores the window, as was reported of FlashAttention 3 on 8.x."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(replace(spec, window=None))


class Trimmed(TorchAttention):
    """Backend of a package that has no kernel for this head size."""

    def plan(self, inputs: AttentionInputs) -> TorchPlan:
        raise RuntimeError("CUDA error: device kernel image is invalid\nmore lines")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_backend_that_is_right_passes(role: Role, page_size: int) -> None:
    for spec in (SPEC, WINDOWED, replace(SPEC, fp8_kv=True), replace(SPEC, num_heads=2)):
        assert self_test_error(TorchAttention, replace(spec, page_size=page_size), CPU, role) is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_wrong_keys_under_a_window_are_found(role: Role) -> None:
    assert self_test_error(BlindToWindows, SPEC, CPU, role) is None, "without windows it is right"
    assert "else here with a sliding window" in (self_test_error(BlindToWindows, WINDOWED, CPU, role) or "")


def test_a_missing_kernel_is_found_in_one_line() -> None:
    why = self_test_error(Trimmed, SPEC, CPU, "prefill")
    assert why == "it does not run here: RuntimeError: CUDA error: device kernel image is invalid"


def test_the_next_best_takes_the_place_of_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = {"fa": Trimmed, "fi": BlindToWindows, "varlen": TorchAttention}
    always = {
        name: Candidate(backend_choice.CANDIDATES[name].title, lambda *_: None, lambda spec, _, make=make: make(spec))
        for name, make in made.items()
    }
    monkeypatch.setattr(backend_choice, "CANDIDATES", always)
    with caplog.at_level(logging.INFO):
        assert Chooser(always, (9, 0)).choose_working("auto", "prefill", WINDOWED, CPU) == "varlen"
    assert "prefill attention would be faster with FlashAttention 3 (fa): it does not run here" in caplog.text
    assert "prefill attention would be faster with FlashInfer (fi): it computes something else" in caplog.text
    caplog.clear()
    assert Chooser(always, (9, 0)).choose_working("fa", "prefill", WINDOWED, CPU) == "varlen"
    assert "--attn fa cannot be used: it does not run here" in caplog.text


def wheels_in(folder: Path) -> Path:
    """nvidia-cuda-nvcc and what it brings, as pip lays them out."""
    root = folder / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudadevrt.a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_the_compiler_of_pip_is_found_and_stands_as_a_toolkit(tmp_path: Path) -> None:
    root = wheels_in(tmp_path)
    assert find_wheels([str(tmp_path / "elsewhere"), str(tmp_path / "nvidia")]) == root
    driver = tmp_path / "libcuda.so.1"
    driver.write_text("driver")
    for _ in range(2):  # a second start finds what the first made
        home = arrange_wheels(root, tmp_path / "cache", driver)
    places = {
        "bin/nvcc": "bin/nvcc",
        "include/cuda.h": "include/cuda.h",
        "nvvm/bin/cicc": "nvvm/bin/cicc",
        "lib64/libcudart.so": "lib/libcudart.so.13",  # the linker resolves -lcudart through this name
        "lib64/libcudadevrt.a": "lib/libcudadevrt.a",
        "lib64/stubs/libcuda.so": "driver",
    }
    assert {name: (home / name).read_text() for name in places} == places


def test_a_toolkit_of_the_machine_comes_first(tmp_path: Path) -> None:
    root, nowhere = wheels_in(tmp_path), tmp_path / "none"
    (root / "bin" / "nvcc").chmod(0o755)
    assert find_cuda_home({"CUDA_HOME": str(root), "PATH": ""}, nowhere) == root
    assert find_cuda_home({"CUDA_HOME": str(nowhere), "PATH": str(root / "bin")}, root) is None, "FlashInfer obeys it"
    assert find_cuda_home({"PATH": str(root / "bin")}, nowhere) == root
    assert find_cuda_home({"PATH": ""}, root) == root
    assert find_cuda_home({"PATH": ""}, nowhere) is None

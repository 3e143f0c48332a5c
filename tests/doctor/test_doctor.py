"""`minisgl doctor` on a machine without a GPU, and what it makes of its findings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from minisgl.doctor.__main__ import driver_version, main
from minisgl.doctor.findings import Finding, State, examine, tried, verdict

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KERNELS = Finding("kernels of csrc/: norm", State.WORKS)


def test_on_the_cpu_all_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "The default path works." in shown
    assert version("torch") in shown
    assert all(finding.state is State.WORKS for finding in examine(CPU))


def test_the_kernel_of_int4_weights_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor names torch's product, and says why, if g++ cannot compile ours."""

    def remark() -> str:
        (found,) = [finding for finding in examine(CPU) if "int4" in finding.part]
        assert found.state is State.WORKS
        return found.remark

    compiled = torch.cpu.get_capabilities().get("avx512_bf16") and shutil.which("g++")
    assert ("by csrc/int4_cpu.cpp" in remark()) == bool(compiled)
    monkeypatch.setenv("CXX", "no-compiler")
    assert "by torch's kernel" in remark()
    if compiled:
        assert "there is no C++ compiler no-compiler" in remark()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().out


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "gpu"])
    assert "--device must be one of auto, cpu, cuda, not gpu" in capsys.readouterr().err


def test_the_flag() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "minisgl", "--check", "--device", "cpu"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "attention: torch" in run.stdout


def test_a_part_that_breaks_or_computes_something_else() -> None:
    def broken() -> tuple[torch.Tensor, torch.Tensor]:
        raise OSError("undefined symbol: x\nand more")

    one = torch.ones(3)
    assert tried("a", broken).remark == "OSError: undefined symbol: x"
    assert tried("b", lambda: (one * 1.5, one)).state is State.FAILS
    assert tried("b", lambda: (one * float("nan"), one)).state is State.FAILS
    assert tried("c", lambda: (one * 1.001, one)).state is State.WORKS


def test_the_verdict() -> None:
    fa, fi = Finding("attention: fa", State.WORKS), Finding("attention: fi", State.ABSENT, "not installed")
    assert verdict([KERNELS, fa, fi], CUDA) is None
    assert "fast attention" in (verdict([KERNELS, fi], CUDA) or "")
    assert "csrc" in (verdict([Finding("kernels of csrc/", State.ABSENT), fa], CUDA) or "")
    assert "attention: fa" in (verdict([KERNELS, Finding("attention: fa", State.FAILS)], CUDA) or "")
    assert verdict([Finding("attention: torch", State.WORKS)], CPU) is None


def test_the_driver() -> None:
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.06  Wed Jun 26 06:46:07 UTC 2024\nGCC version: 12"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root)"
    assert (driver_version(closed), driver_version(opened), driver_version("")) == ("535.183.06", "580.65.06", "")

"""Choice of attention backends, for GPUs that need not be present."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.attention.backend_choice import (
    CANDIDATES,
    Candidate,
    Chooser,
    fused_unsupported,
    latent_unsupported,
    make_attention,
)
from minisgl.attention.backends.page_kernels import PageList, flatten_pages
from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.base import AttentionSpec
from minisgl.attention.self_test import ROLES, Role
from minisgl.config import ConfigError
from minisgl.config.engine import attention_names
from minisgl.kernel.availability import driver_missing
from minisgl.kernel.base import LatentDims
from minisgl.optional_packages import can_be_found, import_error

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
SMALL = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, page_size=64, dtype=torch.bfloat16)
LARGE = replace(SMALL, num_heads=40)


def choose(
    asked: str, role: Role, spec: AttentionSpec, capability: tuple[int, int], candidates: Mapping[str, Candidate]
) -> str:
    return Chooser(candidates, capability).choose(asked, role, spec)


def candidates(missing: Mapping[str, str] = {}, unready: tuple[str, ...] = ()) -> dict[str, Candidate]:
    """The real ones, but for what is installed and compiled."""
    return {
        name: replace(
            candidate,
            unsupported=lambda *_, name=name: missing.get(name),
            ready=lambda *_, name=name: name not in unready,
        )
        for name, candidate in CANDIDATES.items()
    }


@pytest.mark.parametrize(
    ("spec", "capability", "prefill", "decode"),
    [
        (SMALL, HOPPER, "fa", "fused"),
        (LARGE, HOPPER, "fa", "fused"),
        (LARGE, BLACKWELL, "fi", "fused"),
    ],
)
def test_auto_picks_the_fastest(spec: AttentionSpec, capability: tuple[int, int], prefill: str, decode: str) -> None:
    assert choose("auto", "prefill", spec, capability, candidates()) == prefill
    assert choose("auto", "decode", spec, capability, candidates()) == decode


def test_latents_are_for_their_kernels() -> None:
    latents = AttentionSpec(16, 1, 576, 64, torch.bfloat16, latent=LatentDims(512, 64, 128, 128))
    assert [choose("auto", role, latents, HOPPER, candidates()) for role in ROLES] == ["latent", "latent"]
    for backend in ("fa", "fi", "varlen"):
        assert CANDIDATES[backend].unsupported(latents, HOPPER) == "it has no latent attention here"
    unsupported = {
        "it is for latent attention": SMALL,
        "latents of 512 + 64, not of 256 + 64": replace(latents, latent=LatentDims(256, 64, 128, 128), head_dim=320),
        "it does not read latents in 8 bits": replace(latents, fp8_kv=True),
        "it is for bfloat16 and float16, not float32": replace(latents, dtype=torch.float32),
    }
    for why, spec in unsupported.items():
        assert why in str(latent_unsupported(spec, HOPPER))
    assert "compute capability 9.0 or 10.x, not 8.0" in str(latent_unsupported(latents, AMPERE))
    assert latent_unsupported(latents, HOPPER) is None


@pytest.mark.parametrize(
    ("changed", "capability", "why"),
    [
        ({}, HOPPER, None),
        ({}, (10, 0), None),
        ({}, (8, 9), "compute capability 9.0"),
        ({"dtype": torch.float32}, HOPPER, "bfloat16 and float16"),
        ({"head_dim": 256}, HOPPER, None),
        ({"head_dim": 512}, HOPPER, None),
        ({"head_dim": 96}, HOPPER, "64, 128, 256 or 512 dimensions, not 96"),
        ({"num_heads": 64}, HOPPER, None),
        ({"num_heads": 72}, HOPPER, "8 query heads a KV head, not 9"),
        ({"num_heads": 20}, HOPPER, "query heads a KV head"),
        ({"page_size": 24}, HOPPER, "power of two, not 24"),
        ({"fp8_kv": True, "window": 100, "page_size": 1}, HOPPER, None),
    ],
)
def test_which_layers_fused_decode_is_for(
    changed: dict[str, object], capability: tuple[int, int], why: str | None
) -> None:
    unsupported = fused_unsupported(replace(SMALL, **changed), capability)  # type: ignore[arg-type]
    assert unsupported is None if why is None else why in (unsupported or "")


def test_without_the_fused_kernel() -> None:
    others = candidates({"fused": "no clusters"})
    assert choose("auto", "decode", SMALL, HOPPER, others) == "fi"
    assert choose("auto", "decode", LARGE, HOPPER, others) == "fa"
    assert choose("auto", "decode", SMALL, AMPERE, others) == "fi"
    assert choose("auto", "decode", LARGE, AMPERE, candidates({"fused": "", "fa": "", "fi": ""})) == "varlen"
    missing = dict.fromkeys(("fused", "fa", "fi", "varlen"), "")
    assert choose("auto", "decode", LARGE, AMPERE, candidates(missing)) == "torch"


def test_auto_compiles_nothing_and_says_what_would_be_faster(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose("auto", "decode", SMALL, HOPPER, candidates({"fused": "no"}, unready=("fi",))) == "fa"
    assert "decode attention would be faster with FlashInfer" in caplog.text
    assert choose("fi", "decode", SMALL, HOPPER, candidates(unready=("fi",))) == "fi"


def test_a_missing_package_gives_one_line_and_the_next_best(caplog: pytest.LogCaptureFixture) -> None:
    missing = {"fi": "not installed", "fa": "broken"}
    assert choose("fi", "decode", SMALL, HOPPER, candidates({"fi": "not installed", "fused": "no"})) == "fa"
    assert [record.getMessage() for record in caplog.records] == ["--attn fi cannot be used: not installed"]
    assert choose("fa", "prefill", SMALL, HOPPER, candidates(missing)) == "varlen"
    assert choose("fa", "prefill", SMALL, HOPPER, candidates({**missing, "varlen": "no"})) == "torch"


def test_blackwell_prefills_without_a_toolkit() -> None:
    """FlashInfer comes first where its kernels are compiled; torch's own FlashAttention needs nothing."""
    for capability in (BLACKWELL, (12, 0)):
        assert choose("auto", "prefill", SMALL, capability, candidates(unready=("fi",))) == "varlen"
        assert choose("auto", "prefill", SMALL, capability, candidates({"fi": "no toolkit"})) == "varlen"
        assert choose("auto", "prefill", replace(SMALL, fp8_kv=True), capability, CANDIDATES) == "varlen"


def test_flash_attention_3_is_not_trusted_with_windows_on_8x() -> None:
    windowed = replace(SMALL, window=4096)
    assert "window" in (CANDIDATES["fa"].unsupported(windowed, AMPERE) or "")
    assert "window" in (CANDIDATES["fa"].unsupported(windowed, (8, 9)) or "")
    assert "window" not in (CANDIDATES["fa"].unsupported(windowed, HOPPER) or "")
    assert "window" not in (CANDIDATES["fa"].unsupported(SMALL, AMPERE) or "")


def test_backends_name_what_they_have_no_kernels_for() -> None:
    fa, fi = CANDIDATES["fa"], CANDIDATES["fi"]
    assert "not 10.0" in (fa.unsupported(SMALL, BLACKWELL) or "")
    assert "float32" in (fa.unsupported(replace(SMALL, dtype=torch.float32), HOPPER) or "")
    assert "heads of 96" in (fi.unsupported(replace(SMALL, head_dim=96), HOPPER) or "")
    assert "8.0" in (fi.unsupported(SMALL, (7, 5)) or "")
    varlen = CANDIDATES["varlen"]
    assert varlen.unsupported(replace(SMALL, fp8_kv=True, window=100, page_size=7), (12, 0)) is None
    assert "float32" in (varlen.unsupported(replace(SMALL, dtype=torch.float32), HOPPER) or "")
    assert "8.0" in (varlen.unsupported(SMALL, (7, 5)) or "")
    narrow = replace(SMALL, head_dim=24)
    assert "heads of 24" not in (fa.unsupported(narrow, HOPPER) or "")
    assert "heads of 24" in (fa.unsupported(replace(narrow, fp8_kv=True), HOPPER) or "")
    assert "in 8 bits" in (fi.unsupported(replace(SMALL, fp8_kv=True), HOPPER) or "")
    with_sinks = replace(SMALL, has_sinks=True)
    assert "sinks in bfloat16" in (fa.unsupported(replace(with_sinks, dtype=torch.float16), HOPPER) or "")
    assert "sinks" not in (fa.unsupported(with_sinks, HOPPER) or "")
    assert varlen.unsupported(with_sinks, HOPPER) is None
    assert fused_unsupported(with_sinks, HOPPER) is None
    assert fused_unsupported(replace(SMALL, stores_kv=False), HOPPER) is None
    assert "shares K and V of another" in (fused_unsupported(replace(with_sinks, stores_kv=False), HOPPER) or "")


@pytest.mark.parametrize(
    ("name", "spec", "module", "package"),
    [
        ("fa", SMALL, "sgl_kernel.flash_attn", "sglang-kernel"),
        ("fa", replace(SMALL, fp8_kv=True), "cuda.core", "cuda-core"),  # upcasts pages
        ("fi", SMALL, "flashinfer.decode", "flashinfer-python"),
        ("fused", SMALL, "cuda.core", "cuda-core"),
    ],
)
def test_real_candidates_say_which_package_is_missing(
    name: str, spec: AttentionSpec, module: str, package: str
) -> None:
    if can_be_found(module):
        pytest.skip("needs a machine without the package")
    why = CANDIDATES[name].unsupported(spec, HOPPER) or ""
    assert package in why
    assert "is not installed (pip install 'minisgl[" in why


def test_packages_that_are_absent_or_do_not_load() -> None:
    assert "pip install 'minisgl[cuda]'" in (import_error("no_such_package.part", "no-such-package") or "")
    assert "does not load: ModuleNotFoundError" in (import_error("json.no_such_part", "json") or "")
    assert import_error("json.decoder", "json") is None


def test_a_part_of_a_namespace_that_is_absent_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-bindings, which torch brings, shares its namespace with cuda-core."""
    (tmp_path / "shared_namespace" / "bindings").mkdir(parents=True)
    (tmp_path / "shared_namespace" / "bindings" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert "is not installed (pip install" in (import_error("shared_namespace.core", "shared-core") or "")
    assert import_error("shared_namespace.bindings", "shared-bindings") is None


def test_an_import_that_fails_without_a_message_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mute_package.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_error("mute_package", "mute") == "the package mute does not load: ImportError"


@pytest.mark.parametrize(
    ("compiler", "driver", "why"),
    [
        ((13, 3), (13, 0), None),
        ((12, 9), (13, 0), None),
        ((13, 0), (12, 8), "driver for CUDA 13 or later: this one is for 12.8"),
        ((14, 0), (13, 2), "driver for CUDA 14 or later: this one is for 13.2"),
    ],
)
def test_a_driver_too_old_for_what_is_compiled(
    compiler: tuple[int, int], driver: tuple[int, int], why: str | None
) -> None:
    missing = driver_missing(compiler, driver)
    assert missing is None if why is None else why in (missing or "")


def test_on_the_cpu_attention_runs_in_torch() -> None:
    attention = make_attention("fa,fi", [SMALL, SMALL], torch.device("cpu"))
    assert all(isinstance(layer.prefill, TorchAttention) for layer in attention.layers)
    assert not attention.graph_safe


def test_the_flag() -> None:
    assert attention_names("auto") == ("auto", "auto")
    assert attention_names("fa,fi") == ("fa", "fi")
    assert attention_names("fa,fused") == ("fa", "fused")
    assert attention_names("varlen,fused") == ("varlen", "fused")
    for wrong in ("", "fa,fi,torch", "fa,", "flash", "fused", "fused,fa"):
        with pytest.raises(ConfigError, match="--attn must be one of auto, fa, fi, varlen, latent, torch"):
            attention_names(wrong)


def test_flattened_pages() -> None:
    table = torch.tensor([[7, 8, 99], [5, 99, 99], [1, 2, 3]], dtype=torch.int32)
    out = PageList(*(torch.full((size,), -1, dtype=torch.int32) for size in (4, 3, 10)))
    flatten_pages(table, torch.tensor([5, 4, 12], dtype=torch.int32), 4, out)
    assert out.starts.tolist() == [0, 2, 3, 6]
    assert out.last_page_lens.tolist() == [1, 4, 4]
    assert out.pages[:6].tolist() == [7, 8, 5, 1, 2, 3]

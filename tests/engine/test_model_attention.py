"""Attention of layers that differ: the choice of each layer's backends on GPUs that need not be present, and plans."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention import backend_choice
from minisgl.attention.backend_choice import CANDIDATES, make_attention
from minisgl.attention.backends.torch_backend import TorchAttention, TorchPlan
from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.attention.model_attention import LayerAttention, ModelAttention
from minisgl.attention.self_test import AttentionTest, Role
from minisgl.core import Int32Array
from minisgl.kernel.base import LatentDims

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FULL = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=256, page_size=16, dtype=torch.bfloat16)
LOCAL = replace(FULL, window=20)
GEMMA = [LOCAL] * 5 + [FULL] + [LOCAL] * 2


class Named(TorchAttention):
    """Stand-in for a backend whose package is not installed."""

    graph_safe = True

    def __init__(self, name: str, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.name = name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which all packages are installed and nothing has to be compiled; without clusters, so no `fused`."""
    installed = {
        name: replace(each, ready=lambda *_: True, make=lambda spec, _, name=name: Named(name, spec))
        for name, each in CANDIDATES.items()
    }
    monkeypatch.setattr(backend_choice, "CANDIDATES", installed)
    monkeypatch.setattr(backend_choice, "import_error", lambda *_: None)
    monkeypatch.setattr(backend_choice, "self_test_error", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    return monkeypatch


def names(attention: ModelAttention) -> list[tuple[str, str]]:
    found = []
    for layer in attention.layers:
        assert isinstance(layer.prefill, Named)
        assert isinstance(layer.decode, Named)
        found.append((layer.prefill.name, layer.decode.name))
    return found


def test_a_backend_is_chosen_by_layer(gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """FlashAttention 3 is not trusted with windows on 8.x, so layers without one keep it, and the log says it once."""
    gpu.setattr(backend_choice, "import_error", lambda module, *_: "absent" if "flashinfer" in module else None)
    with caplog.at_level(logging.INFO):
        attention = make_attention("auto", [*GEMMA, replace(LOCAL, window=30)], CUDA)
    assert names(attention) == [("varlen", "varlen")] * 5 + [("fa", "fa")] + [("varlen", "varlen")] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert sum("faster with FlashAttention 3 (fa)" in line and line.startswith("prefill") for line in lines) == 1
    assert len(lines) == len(set(lines))
    assert lines[-2:] == ["attention of 8 layers: varlen", "attention of 1 layers: fa"]


def test_layers_of_one_spec_share_a_backend(gpu: pytest.MonkeyPatch) -> None:
    layers = make_attention("fa,fi", GEMMA, CUDA).layers
    assert len({id(layer.decode) for layer in layers}) == 2
    assert len({id(layer.prefill) for layer in layers}) == 2
    assert names(make_attention("fa,fi", [FULL], CUDA)) == [("fa", "fi")]
    (alone,) = make_attention("fa", [FULL], CUDA).layers
    assert alone.prefill is alone.decode


def test_a_backend_that_fails_its_self_test_is_passed_over_for_that_layer_alone(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(backend_choice, "self_test_error", lambda _, spec, *__: "wrong" if spec.window == 20 else None)
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu.setattr(backend_choice, "import_error", lambda module, *_: "absent" if "cuda.core" in module else None)
    attention = make_attention("fa", GEMMA, CUDA)
    assert names(attention)[0] == ("torch", "torch")
    assert names(attention)[5] == ("fa", "fa")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_layer_is_planned_for_its_own_window(role: Role) -> None:
    specs = [replace(spec, dtype=torch.float32) for spec in (LOCAL, FULL, LOCAL)]
    attention = make_attention("auto", specs, CPU)
    test = AttentionTest(specs[1], CPU, role)
    plans = attention.plan(test.inputs)
    assert plans[0] is plans[2]
    for layer, spec in enumerate(specs):
        want = TorchAttention(spec).plan(test.inputs).forward(0, test.q, test.pool)
        torch.testing.assert_close(plans[layer].forward(0, test.q, test.pool), want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plans[0].forward(0, test.q, test.pool), plans[1].forward(0, test.q, test.pool))


@dataclass(frozen=True)
class FusedLayers:
    """Stands for FusedDecode, whose kernels need a GPU: the rows that it binds are their window."""

    def rows(self, spec: AttentionSpec, slots: Tensor, kv_lens: Tensor, page_table: Tensor) -> int | None:
        return spec.window


class PlannedOnHost(TorchAttention):
    """A backend whose captured decodes are planned on the host, as FlashInfer's are."""

    graph_safe = True
    prepared: list[list[int]]

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.prepared = []

    def graphed_decode(self, rows: int) -> PlannedOnHost:
        return self

    def prepare(self, positions: Int32Array) -> None:
        self.prepared.append(positions.tolist())


def one_token_each(rows: int) -> AttentionInputs:
    lens = np.full(rows, 5, dtype=np.int32)
    table = torch.zeros(rows, 1, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    return AttentionInputs(np.ones(rows, dtype=np.int32), lens, starts, torch.from_numpy(lens), table)


def test_some_layers_of_a_captured_decode_are_fused_and_others_are_not() -> None:
    odd = replace(FULL, head_dim=96)
    backends = {spec: PlannedOnHost(spec) for spec in (LOCAL, FULL, odd)}
    fused = FusedLayers()
    layers = [
        LayerAttention("", spec, backends[spec], backends[spec], None if spec == odd else fused)  # type: ignore[arg-type]
        for spec in (LOCAL, odd, FULL, LOCAL)
    ]
    attention = ModelAttention(layers)
    assert attention.graph_safe
    decode = attention.capture_decode(rows=3)
    assert decode.reads_page_table
    empty = torch.zeros(0)
    rows: Mapping[int, object] = decode.fused_rows(empty, empty, empty)
    assert rows == {0: 20, 2: None, 3: 20}
    plans = decode.plan(one_token_each(3))
    assert list(plans) == [1]
    assert isinstance(plans[1], TorchPlan)
    decode.prepare(np.array([4, 7], dtype=np.int32))
    assert backends[odd].prepared == [[0, 0, 0], [4, 7]]
    assert backends[FULL].prepared == [], "full attention decodes in the fused kernel"
    assert not ModelAttention(layers[:1]).capture_decode(3).reads_page_table


@pytest.mark.parametrize("window_group", [False, True])
def test_a_captured_decode_reads_the_tables_of_its_layers_groups(*, window_group: bool) -> None:
    backends = {spec: PlannedOnHost(spec) for spec in (LOCAL, FULL)}
    layers = [LayerAttention("", spec, backends[spec], backends[spec]) for spec in (LOCAL, FULL)]

    def tables(layers: list[LayerAttention]) -> tuple[bool, bool]:
        decode = ModelAttention(layers, window_group=window_group).capture_decode(rows=3)
        return decode.reads_page_table, decode.reads_window_table

    assert tables(layers) == (True, window_group)
    assert tables(layers[:1]) == (not window_group, window_group)


def test_one_layer_that_no_graph_may_hold_keeps_all_from_being_captured() -> None:
    safe, unsafe = Named("fi", FULL), TorchAttention(LOCAL)
    layers = [LayerAttention("", FULL, safe, safe), LayerAttention("", LOCAL, unsafe, unsafe)]
    assert ModelAttention(layers[:1]).graph_safe
    assert not ModelAttention(layers).graph_safe


def test_the_pool_holds_what_each_layer_stores() -> None:
    specs = [FULL, replace(FULL, head_dim=128, num_kv_heads=2), LOCAL]
    layers = [LayerAttention("", spec, TorchAttention(spec), TorchAttention(spec)) for spec in specs]
    layout = ModelAttention(layers).kv_layout
    assert layout.pool_bytes(1) == 16 * 2 * 2 * (4 * 256 + 2 * 128 + 4 * 256)
    assert layout.upcast == ()


def test_layers_that_upcast_share_one_buffer() -> None:
    class Upcasts(TorchAttention):
        upcasts = True

    specs = [replace(FULL, fp8_kv=True), replace(LOCAL, fp8_kv=True), replace(FULL, fp8_kv=True, head_dim=128)]
    layers = [LayerAttention("", spec, Upcasts(spec), Upcasts(spec)) for spec in specs]
    layout = ModelAttention(layers[:2]).kv_layout
    assert layout.upcast == FULL.kv_stores()
    assert layout.pool_bytes(1) == 16 * 2 * 4 * 256 * (2 + 2)  # two layers of 8 bits, and one of 16
    with pytest.raises(ValueError, match="must store alike"):
        _ = ModelAttention(layers).kv_layout


def test_long_chunks_of_latents_after_many_tokens_run_without_graphs() -> None:
    latents = AttentionSpec(16, 1, 576, 16, torch.float32, latent=LatentDims(512, 64, 128, 128))
    queries = np.array([1, 1, 200], dtype=np.int32)
    short, long = queries + 1000, queries + np.array([9000, 9000, 4000], dtype=np.int32)
    for spec, fits in ((latents, [True, False]), (FULL, [True, True])):
        attention = make_attention("auto", [replace(spec, dtype=torch.float32)], CPU)
        assert [attention.fits_graph(queries, kv_lens) for kv_lens in (short, long)] == fits

"""`minisgl verify`: passes on what is right, fails on what is a little wrong, and says where."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.verify import oracle
from minisgl.verify.__main__ import main
from minisgl.verify.compare import Run, common_length, compare_rows, tolerance
from minisgl.verify.findings import Beyond, PromptResult
from minisgl.verify.prompt_texts import make_prompts
from models.quantized import save_quantized
from models.tiny import VOCAB, make_model
from support.tiny_tokenizer import save_byte_tokenizer

QUICK = ["--device", "cpu", "--new-tokens", "4"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "tiny"
    make_model("qwen3", num_hidden_layers=3).save_pretrained(folder)
    save_byte_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit code and the JSON."""

    def run(*argv: str) -> tuple[int, dict[str, Any]]:
        code = main([*argv, *QUICK, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def changed(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with other weights."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_the_demo_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "PASSED" in out
    assert "prose 200 + 25" in out


@pytest.mark.parametrize("options", [["--page-size", "1", "--cache", "naive"], ["--max-prefill-length", "30"]], ids=str)
def test_other_pages_chunks_and_caches_pass(
    tiny: Path, verify: Callable[..., tuple[int, dict[str, Any]]], options: list[str]
) -> None:
    code, found = verify(str(tiny), *options)
    assert (code, found["ok"], found["parts_at"]) == (0, True, None)
    # Every position of the prompts and of what was generated but the last, in the first pass at least.
    for prompt in found["prompts"]:
        total = 2 * (prompt["prompt_tokens"] + prompt["new_tokens"] - 1)
        assert prompt["compared"] == total - prompt["cached"]
    cached = sum(prompt["cached"] for prompt in found["prompts"])
    assert (cached > 0) == ("naive" not in options)


def test_a_small_pool_bounds_the_prompts(tiny: Path, verify: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, found = verify(str(tiny), "--num-pages", "2")
    assert code == 0
    assert max(prompt["prompt_tokens"] + prompt["new_tokens"] for prompt in found["prompts"]) == 2 * 64


def test_bfloat16_passes_within_its_own_rounding(tiny: Path, verify: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, found = verify(str(tiny), "--dtype", "bfloat16")
    assert code == 0, found
    assert max(prompt["rms"] for prompt in found["prompts"]) > tolerance("float32", 3).rms


def sharp(weights: dict[str, torch.Tensor]) -> None:
    """Let attention choose one key: rounding turns the choice over, as repeated tokens do in trained models."""
    for name, weight in weights.items():
        if "q_norm" in name:
            weight *= 40


@pytest.fixture(params=[True, False], ids=["float32-fits", "no-float32"])
def has_room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Say whether the weights in float32 fit into memory, which this fixture decides."""
    monkeypatch.setattr(oracle, "_has_room_for_float32", lambda *_: request.param)
    return bool(request.param)


def test_weights_that_amplify_rounding_widen_the_limit(
    tiny: Path, tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]], has_room: bool
) -> None:
    copy = changed(tiny, tmp_path / "sharp", sharp)
    code, found = verify(str(copy), "--dtype", "bfloat16")
    assert code == 0, found
    assert found["is_float32"] == has_room
    wider = [prompt for prompt in found["prompts"] if prompt["limit"] > tolerance("bfloat16", 3).rms]
    assert any(prompt["rms"] > tolerance("bfloat16", 3).rms for prompt in wider)
    largest = max(prompt["rounding"] for prompt in wider)
    for prompt in wider:
        assert prompt["limit"] == pytest.approx(2 * (prompt["rounding"] if has_room else largest))


@pytest.mark.usefixtures("has_room")
def test_experts_chosen_at_near_ties_widen_the_limits_of_all_prompts(
    tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    make_model("qwen3-moe").save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path, VOCAB)
    code, found = verify(str(tmp_path), "--dtype", "bfloat16")
    assert code == 0, found
    prompts = found["prompts"]
    assert any(prompt["rms"] > 2 * prompt["rounding"] > tolerance("bfloat16", 3).rms for prompt in prompts)
    assert {prompt["limit"] for prompt in prompts} == {2 * max(prompt["rounding"] for prompt in prompts)}


@pytest.mark.usefixtures("has_room")
def test_a_wrong_model_in_bfloat16_is_found(
    tiny: Path, tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    def tamper(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"] *= 2

    copy = changed(tiny, tmp_path / "copy", tamper)
    assert verify(str(copy), "--reference", str(tiny), "--dtype", "bfloat16")[0] == 1


def test_a_changed_weight_is_found_and_its_layer_named(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tamper(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"] *= 1.01

    copy = changed(tiny, tmp_path / "copy", tamper)
    assert main([str(copy), "--reference", str(tiny), *QUICK]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAILED" in out
    assert "the two part at layer 1" in out
    assert "prose 1 (first pass): logits differ beyond rounding from position 0" in out


def test_a_wrong_rope_theta_is_found_after_the_first_token(
    tiny: Path, tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.5
    (copy / "config.json").write_text(json.dumps(config))
    code, found = verify(str(copy), "--reference", str(tiny))
    assert code == 1
    assert found["parts_at"] == "layer 0"
    firsts = [prompt["beyond"]["logits"]["position"] for prompt in found["prompts"] if prompt["beyond"]]
    assert min(firsts) >= 1  # at position 0 nothing is rotated
    assert len(firsts) == len(found["prompts"])


def test_a_wrong_head_parts_after_the_layers(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tamper(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, dims=0)  # every token is its neighbour

    copy = changed(tiny, tmp_path / "copy", tamper)
    assert main([str(copy), "--reference", str(tiny), *QUICK]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "layer 2, the final norm or the head" in out
    assert "tokens part at new token 0" in out
    assert "no near tie" in out


def test_without_a_tokenizer_the_prompts_are_random(
    tiny: Path, tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy, ignore=shutil.ignore_patterns("tokenizer*"))
    code, found = verify(str(copy))
    assert code == 0
    assert found["prompts"][0]["name"] == "random 1"


def test_models_that_cannot_be_compared_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), *QUICK]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert main(["demo", "--reference", str(tmp_path), *QUICK]) == 2
    assert "transformers cannot load" in capsys.readouterr().err


def test_weights_that_transformers_cannot_load_are_no_difference(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()

    assert main([str(tiny), "--reference", str(changed(tiny, tmp_path / "cut", cut)), *QUICK]) == 2
    assert "error: transformers cannot load" in (err := capsys.readouterr().err)
    assert err.count("\n") == 1
    shutil.copytree(tiny, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"x" * 16)
    assert main([str(tiny), "--reference", str(tmp_path / "broken"), *QUICK]) == 2
    assert "error: transformers cannot load" in capsys.readouterr().err


def test_a_format_that_transformers_does_not_know_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    """If transformers does not know the quant_method, it takes the stored bits for values."""
    quantized, plain = save_quantized(tmp_path, "qwen3", "modelopt")
    for folder in (quantized, plain):
        save_byte_tokenizer(folder, VOCAB)
    assert main([str(quantized), *QUICK]) == 2
    assert re.search(
        r"error: transformers does not know .*_proj\.weight_scale and .* --reference", capsys.readouterr().err
    )
    assert verify(str(quantized), "--reference", str(plain))[0] == 0


def test_a_reference_with_a_smaller_vocabulary_is_no_difference(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("qwen3", num_hidden_layers=3, vocab_size=50).save_pretrained(tmp_path)
    assert main([str(tiny), "--reference", str(tmp_path), *QUICK]) == 2
    assert "error: transformers cannot run" in capsys.readouterr().err


def test_experts_of_a_width_that_grouped_products_refuse(
    tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    make_model("qwen3-moe", moe_intermediate_size=17).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path, VOCAB)
    assert verify(str(tmp_path))[0] == 0


def test_prompts_fit_and_share_a_beginning() -> None:
    prompts = make_prompts(lambda text: list(text.encode()), vocab_size=256, max_len=230)
    assert [len(prompt.tokens) for prompt in prompts] == [1, 7, 17, 32, 63, 65, 90, 129, 200, 230, 225, 230]
    assert prompts[-1].tokens[:200] == prompts[-2].tokens[:200] == prompts[-4].tokens
    assert len({prompt.name for prompt in prompts}) == len(prompts)


def test_a_tie_is_rounding_and_a_clear_choice_is_not() -> None:
    limits = tolerance("float32", 2)
    theirs = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    theirs[1, 7] = theirs[1].max() + 1.0
    theirs[1, 9] = theirs[1, 7] - limits.rms / 2
    ours = theirs.copy()
    ours[1, 9] += limits.rms
    run = Run(tokens=[int(theirs[0].argmax()), 9, 3])
    run.positions = {position.position: position for position in compare_rows(0, ours, theirs)}
    expected = theirs.argmax(axis=1).tolist()
    parting = run.parting(1, expected, theirs)
    assert parting is not None
    assert (parting.step, parting.ours.token, parting.theirs.token) == (1, 9, 7)
    assert parting.near_tie(limits)
    assert all(position.within(limits) for position in run.positions.values())

    run.tokens[1] = 11  # a token that is not even our best: the sampler is wrong
    parting = run.parting(1, expected, theirs)
    assert parting is not None
    assert not parting.is_our_best
    assert not parting.near_tie(limits)

    ours[2] += np.float32("nan")
    assert not compare_rows(2, ours[2:], theirs[2:])[0].within(limits)


def test_a_prompt_passes_only_if_logits_were_compared_and_none_is_beyond() -> None:
    (same,) = compare_rows(0, *[np.arange(4, dtype=np.float32)[None]] * 2)
    numbers = {"absolute": 0.0, "largest": 0.0, "rms": 0.0, "rounding": 0.0, "limit": 1.0}
    right = PromptResult("", 3, 4, compared=6, cached=0, **numbers, beyond=None, apart=[])
    assert right.ok
    assert not replace(right, compared=0).ok
    assert not replace(right, beyond=Beyond("first", same)).ok


def test_common_length() -> None:
    assert [common_length(a, b) for a, b in (([], [1]), ([1, 2], [1, 3]), ([1], [1, 2]), ([1, 2], [1, 2]))] == [
        0,
        1,
        1,
        2,
    ]

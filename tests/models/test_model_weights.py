"""Loading: sharded and odd checkpoints load right or are refused by a line that names what is wrong."""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from minisgl.cli import model_name
from minisgl.config import SourceConfig
from minisgl.distributed import SingleRank
from minisgl.layers.linear import allocate
from minisgl.layers.weight_slice import Loadable
from minisgl.models.config.model_config import UnsupportedModel, WeightError
from minisgl.models.decoder import CausalLM
from minisgl.models.hub import demo_folder, find_model, model_folder
from minisgl.models.load_config import load_model_config
from minisgl.models.weights.loading import LoadOptions, build_model, load_model
from models.test_model_tp import Rank
from models.tiny import FAMILIES, make_model

CPU = torch.device("cpu")
Saved = Callable[[str], tuple[Any, Path]]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER_INPUTS = "model.layer_inputs.table"


def load(
    folder: Path, tp: Any = None, dtype: torch.dtype = torch.float32, *, progress: bool = False, **options: Any
) -> CausalLM:
    config, tp = load_model_config(folder), tp or SingleRank()
    return load_model(config, folder, LoadOptions(**options), tp=tp, dtype=dtype, device=CPU, progress=progress)


def assert_same(a: CausalLM, b: CausalLM) -> None:
    for (name, x), (other, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(x, y), name


@pytest.fixture
def changed(saved: Saved, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a saved model with some tensors replaced (None: left out) and config keys changed."""

    def make(kind: str, tensors: dict[str, torch.Tensor | None], **config: Any) -> Path:
        _, folder = saved(kind)
        raw = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
        both = {**load_file(folder / "model.safetensors"), **tensors}
        save_file(
            {name: tensor for name, tensor in both.items() if tensor is not None},
            tmp_path / "model.safetensors",
        )
        return tmp_path

    return make


@pytest.mark.parametrize("kind", FAMILIES)
def test_sharded_checkpoints(saved: Saved, kind: str, tmp_path: Path) -> None:
    model, folder = saved(kind)
    stored, linked = tmp_path / "blobs", tmp_path / "snapshot"  # the layout of the hub's cache
    model.save_pretrained(stored, max_shard_size="40KB")
    assert len(list(stored.glob("*.safetensors"))) > 3
    assert_same(load(stored), load(folder))
    linked.mkdir()
    for file in stored.iterdir():
        (linked / file.name).symlink_to(Path("..", "blobs", file.name))
    assert_same(load(linked), load(folder))


def test_a_single_file_takes_precedence_over_a_stale_index(saved: Saved, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, folder = saved("llama")
    make_model("llama", num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size="40KB")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.model.norm.weight, model.model.norm.weight)
    assert_same(load(tmp_path), load(folder))
    next(tmp_path.glob("model-*.safetensors")).unlink()
    assert_same(load(tmp_path), load(folder))


def test_experts_stacked_as_transformers_holds_them(saved: Saved, tmp_path: Path) -> None:
    model, folder = saved("qwen3-moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.mlp.experts.0.up_proj.weight" not in names
    for tp in (SingleRank(), Rank(0, 3), Rank(2, 3)):
        assert_same(load(tmp_path, tp=tp), load(folder, tp=tp))


def test_matrices_merged_in_the_file(saved: Saved, changed: Callable[..., Path]) -> None:
    """q, k and v, or gate and up, as one matrix, on every rank; Phi-3's are, and any family's may be."""
    _, folder = saved("llama-bias")
    file = load_file(folder / "model.safetensors")
    changes: dict[str, torch.Tensor | None] = {}
    for prefix, names in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        for layer, kind in itertools.product(range(2), ("weight", "bias")):
            path = f"model.layers.{layer}.{prefix.partition('.')[0]}"
            parts = [f"{path}.{name}_proj.{kind}" for name in names]
            changes |= dict.fromkeys(parts)
            changes[f"model.layers.{layer}.{prefix}.{kind}"] = torch.cat([file[part] for part in parts])
    merged = changed("llama-bias", changes)
    for rank, size in ((0, 1), (0, 2), (1, 2), (2, 3)):
        assert_same(load(merged, tp=Rank(rank, size)), load(folder, tp=Rank(rank, size)))


def test_a_missing_expert(changed: Callable[..., Path]) -> None:
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    with pytest.raises(WeightError, match=rf"lacks {name}$"):
        load(changed("qwen3-moe", {name: None}))


def test_slices_fill_every_parameter_on_every_rank(saved: Saved) -> None:
    """Each element of each parameter is filled once, but for the padding of the vocabulary, which is zero."""
    for kind in FAMILIES:
        config = load_model_config(saved(kind)[1])
        for tp in (SingleRank(), *(Rank(rank, 3) for rank in range(3))):
            model = build_model(config, tp=tp, dtype=torch.float32, device=CPU)
            for module in model.modules():
                allocate(module, CPU)
            padding = 2 if tp.rank == 2 else 0
            for parameter in model.parameters():
                parameter.zero_()
            for name, module in model.named_modules():
                for part in module.weight_slices(name) if isinstance(module, Loadable) else ():
                    assert part.target.shape == torch.empty(part.shape)[part.source].shape
                    if not part.tied:
                        part.target.add_(1)
            for name, parameter in model.named_parameters():
                unfilled = padding * parameter.shape[1] if name in (HEAD, EMBEDDING, LAYER_INPUTS) else 0
                assert parameter.sum() == parameter.numel() - unfilled, name


def test_weights_are_cast_to_the_model_dtype(saved: Saved, tmp_path: Path) -> None:
    _, folder = saved("qwen3")
    half = make_model("qwen3").to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    assert_same(load(folder, dtype=torch.bfloat16), load(tmp_path, dtype=torch.bfloat16))
    assert load(tmp_path).dtype == torch.float32
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.float32}


def test_tied_model_with_a_head_in_its_file(saved: Saved, changed: Callable[..., Path]) -> None:
    _, folder = saved("llama-tied")
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    model = load(changed("llama-tied", {HEAD: embedding.clone()}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, load(folder))


def test_tied_model_with_another_head_in_its_file(changed: Callable[..., Path]) -> None:
    """transformers would use the file's head; the config says otherwise, so we say which is wrong."""
    folder = changed("llama-tied", {HEAD: torch.ones(199, 72)})
    with pytest.raises(WeightError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"):
        load(folder)


def test_untied_config_without_a_head(changed: Callable[..., Path]) -> None:
    with pytest.raises(WeightError, match=r"lacks lm_head\.weight$"):
        load(changed("llama", {HEAD: None}))


def test_old_rotary_buffers_are_ignored(changed: Callable[..., Path], saved: Saved) -> None:
    folder = changed("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert_same(load(folder), load(saved("llama")[1]))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(31, 72)},
            {},
            r"model\.layers\.0\.self_attn\.k_proj\.weight has shape \[31, 72\], but .* asks for \[32, 72\]",
        ),
        ({"model.norm.weight": torch.ones(1, 72)}, {}, r"model\.norm\.weight has shape \[1, 72\]"),
        ({"model.layers.1.mlp.up_proj.weight": None}, {}, r"lacks model\.layers\.1\.mlp\.up_proj\.weight$"),
        ({"model.layers.0.mlp.router.weight": torch.ones(4, 72)}, {}, r"does not use: .*router\.weight$"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(1)}, {}, r"does not use: .*k_scale$"),  # an FP8 cache's
        ({}, {"num_hidden_layers": 3}, r"lacks model\.layers\.2\..* and \d+ more$"),
        ({}, {"num_hidden_layers": 1}, r"does not use: model\.layers\.1\..* and \d+ more$"),
        ({}, {"attention_bias": True}, r"lacks .*bias and \d+ more$"),
    ],
)
def test_checkpoints_that_do_not_fit(
    changed: Callable[..., Path], tensors: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightError, match=message) as error:
        load(changed("llama", tensors, **config))
    assert "\n" not in str(error.value)


def test_missing_and_broken_files(saved: Saved, tmp_path: Path) -> None:
    model, folder = saved("llama")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(WeightError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json$"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightError, match=r"pytorch_model\.bin is not supported: convert it to safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(WeightError, match="is not a readable safetensors file: Error while deserializing header"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000\n")
    with pytest.raises(WeightError, match=r"it is a Git LFS pointer; `git lfs pull` downloads the file$"):
        load(tmp_path)

    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    first = min(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(WeightError, match=rf"lacks {first.name}, named by"):
        load(tmp_path)
    for broken in ("{", "[]", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(WeightError, match="is not a safetensors index"):
            load(tmp_path)
    for strange in ("5", "null", '"/etc/hostname"', '"../model.safetensors"'):
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": {strange}}}}}')
        with pytest.raises(WeightError, match="names something else than files of its folder"):
            load(tmp_path)


def test_a_tensor_in_two_files(saved: Saved, tmp_path: Path) -> None:
    """The index says which of the two counts."""
    model, folder = saved("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    own = raw["weight_map"][EMBEDDING]
    for other in {*raw["weight_map"].values()} - {own}:
        tensors = load_file(tmp_path / other)
        save_file({**tensors, EMBEDDING: torch.ones(199, 72)}, tmp_path / other)
    assert_same(load(tmp_path), load(folder))
    del raw["weight_map"][EMBEDDING]
    index.write_text(json.dumps(raw))
    with pytest.raises(WeightError, match=r"embed_tokens\.weight is in .*\.safetensors and in .* names neither for it"):
        load(tmp_path)


def test_progress_bar_is_shown_only_if_asked(saved: Saved, capfd: pytest.CaptureFixture[str]) -> None:
    load(saved("llama")[1])
    assert capfd.readouterr() == ("", "")
    load(saved("llama")[1], progress=True)
    out, err = capfd.readouterr()
    assert not out
    assert re.fullmatch(r"\S+ Loading weights: (\S+) of \1 \(100%\)\n", err)


@pytest.mark.parametrize("kind", FAMILIES)
def test_dummy_weights(saved: Saved, kind: str, tmp_path: Path) -> None:
    """No file is read; the same for a seed, and plausible."""
    config = load_model_config(saved(kind)[1])

    def make(seed: int, tp: Any = SingleRank()) -> CausalLM:  # noqa: B008
        options = LoadOptions(load_format="dummy", seed=seed)
        return load_model(config, tmp_path, options, tp=tp, dtype=torch.float32, device=CPU)

    model = make(1)
    assert_same(model, make(1))
    assert not torch.equal(model.model.embed_tokens.weight, make(2).model.embed_tokens.weight)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            chance = 4 * (2 * parameter.numel()) ** -0.5  # four standard errors of the standard deviation
            assert parameter.std().item() == pytest.approx(config.initializer_range, rel=max(0.1, chance)), name
        else:
            zero = name.endswith(("bias", "sinks.weight", "a_log.weight", "dt_bias.weight"))
            one = config.hidden_size**-0.5 if name.endswith("router.scale") else 1  # Gemma 4's router
            assert (parameter == (0 if zero else one)).all(), name
    last = make(1, Rank(2, 3))
    divided = 0
    for (name, mine), (_, theirs) in zip(make(1, Rank(1, 3)).named_parameters(), last.named_parameters(), strict=True):
        is_whole = mine.shape == model.get_parameter(name).shape
        divided += not is_whole
        if mine.ndim >= 2 and mine.shape == theirs.shape:
            assert torch.equal(mine, theirs) == is_whole, name
    assert divided
    padded = last.model.embed_tokens.weight
    assert (padded[-2:] == 0).all()
    assert (padded[:-2] != 0).all()


def test_meta_device_takes_no_memory(saved: Saved) -> None:
    config = load_model_config(saved("llama")[1])
    model = build_model(config, tp=SingleRank(), dtype=torch.bfloat16, device=torch.device("meta"))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_local_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "./nothing", "~nobody-is-so-called/m", "a/b/c", "../up", "", "bad name", "x--y/..", "x" * 300],
)
def test_names_that_cannot_be_hub_ids(name: str) -> None:
    assert model_name(name) == name
    with pytest.raises(UnsupportedModel, match=r"does not exist|is a file|cannot be read: File name too long"):
        model_folder(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UnsupportedModel, match="is a file; a model is a folder or a hub id"):
        model_folder(str(tmp_path / "model.gguf"))


def test_models_come_from_modelscope_if_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in takes the place of the package, whose hub no test can reach."""
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UnsupportedModel, match=r"pip install 'minisgl\[modelscope\]'$"):
        model_folder("owner/name", hub="modelscope")
    assert model_folder(str(tmp_path), hub="modelscope") == tmp_path, "a folder needs no hub"
    calls = []

    def snapshot_download(name: str, *, revision: str | None, **patterns: list[str]) -> str:
        if name == "owner/none":
            raise RuntimeError("404\nnot found")
        calls.append((name, revision, *filter_repo_objects(REPOSITORY, **patterns)))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "modelscope", types.SimpleNamespace(snapshot_download=snapshot_download))
    (tmp_path / "model.safetensors").touch()
    source = SourceConfig(model="owner/name", revision="v1", tokenizer="owner/words", model_source="modelscope")
    assert find_model(source) == (tmp_path, tmp_path)
    small = [name for name in REPOSITORY[:9] if not name.endswith(".safetensors")]
    assert calls == [("owner/name", "v1", *REPOSITORY[:9]), ("owner/words", None, *small)]
    with pytest.raises(UnsupportedModel, match=r"owner/none could not be downloaded from ModelScope: 404$"):
        model_folder("owner/none", hub="modelscope")


def test_a_revision_is_of_a_hub(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"--revision main is of a hub's model, but .* is a folder"):
        model_folder(str(tmp_path), revision="main")


def test_the_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    assert find_model(SourceConfig(tokenizer=str(tmp_path))) == (demo_folder(), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"^--tokenizer: model /no/such/folder does not exist"):
        find_model(SourceConfig(tokenizer="/no/such/folder"))


REPOSITORY = [
    *("config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"),
    *("tokenizer.model", "merges.txt", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
    "1_Pooling/config.json",
    # files that are not downloaded
    *("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "pytorch_model.bin", "README.md"),
    *("original/params.json", "original/tokenizer.model", "fp8/model.safetensors", "a/b/merges.txt"),
]

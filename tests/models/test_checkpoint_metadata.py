"""Facts from files beside config.json: the checkpoint's dtype, and the token that ends the tokenizer's texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.models.load_config import load_model_config
from models.tiny import make_model
from tokenizer import small


def bare(folder: Path, **changes: Any) -> None:
    """config.json without a dtype."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("dtype", None)
    raw.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_checkpoints_dtype_is_taken_if_the_file_names_none(tmp_path: Path, dtype: str, size: str) -> None:
    from transformers import AutoModelForCausalLM

    make_model("llama").to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size=size)
    bare(tmp_path)
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path).dtype) == f"torch.{dtype}"
    assert load_model_config(tmp_path).dtype == dtype
    bare(tmp_path, torch_dtype="float32")
    assert load_model_config(tmp_path).dtype == "float32"


def test_the_dtype_of_the_first_floating_tensor_by_name(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float()  # safetensors writes the widest first
    weights["a.count"] = torch.ones(1, dtype=torch.int64)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    bare(tmp_path)
    dtype = load_model_config(tmp_path).dtype
    assert dtype == "bfloat16"
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path).dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}", None])
def test_without_a_checkpoint_it_is_float32(tmp_path: Path, content: bytes | None) -> None:
    make_model("llama").save_pretrained(tmp_path)
    bare(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert load_model_config(tmp_path).dtype == "float32"


LISTED = {"7": {"content": "<|turn|>", "special": True}, "5": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("kind", "config", "older"),
    [
        ("llama", {"eos_token": "</s>"}, {}),
        ("llama", {"eos_token": {"__type": "AddedToken", "content": "</s>"}}, {}),
        ("llama", {}, {"eos_token": "</s>"}),
        ("llama", {"eos_token": "he"}, {}),  # an ordinary token, not an added one
        ("byte_level", {"eos_token": "</s>"}, {}),
        ("byte_level", {"eos_token": "hello"}, {}),
        ("metaspace", {"eos_token": "▁the"}, {}),
        ("llama", {"eos_token": None}, {}),
        ("llama", {}, {}),
    ],
)
def test_the_tokenizers_own_end_token_ends_answers(
    tmp_path: Path, kind: str, config: dict[str, Any], older: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    make_model("llama", vocab_size=500, eos_token_id=[450, 451]).save_pretrained(tmp_path)
    small.KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    own = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert load_model_config(tmp_path).eos_token_ids == (450, 451, *([] if own is None else [own]))
    assert (own is None) == (not config.get("eos_token") and not older)


def test_the_tokenizers_end_token_where_it_is_listed_or_cannot_be_found(tmp_path: Path) -> None:
    make_model("llama", eos_token_id=2).save_pretrained(tmp_path)

    def ends(config: str, tokenizer: str | None = None) -> tuple[int, ...]:
        (tmp_path / "tokenizer_config.json").write_text(config)
        if tokenizer is not None:
            (tmp_path / "tokenizer.json").write_text(tokenizer)
        return load_model_config(tmp_path).eos_token_ids

    assert ends(json.dumps({"eos_token": "<|turn|>", "added_tokens_decoder": LISTED})) == (2, 7)
    listed_elsewhere = {"eos_token": "<|turn|>", "added_tokens_decoder": {"5": {"content": "</s>"}}}
    assert ends(json.dumps(listed_elsewhere)) == (2,)
    assert ends(json.dumps(listed_elsewhere), '{"model": {"vocab": {"<|turn|>": 9}}}') == (2, 9)
    assert ends(json.dumps(listed_elsewhere), '{"model": {"vocab": {"<|turn|>": 199}}}') == (2,)  # the model lacks it
    assert ends("{}") == (2,)
    for broken in ("{", "[]", '{"eos_token": 3}', '{"eos_token": "a", "added_tokens_decoder": ["a"]}'):
        assert ends(broken, "{") == (2,)
    assert ends('{"eos_token": "a", "added_tokens_decoder": {"x": {"content": "a"}, "1": "a"}}') == (2,)

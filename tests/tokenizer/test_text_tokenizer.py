"""Loading a model folder's tokenizer, and encoding."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import minisgl
from minisgl.config import ConfigError
from minisgl.sampling_params import InvalidRequest
from minisgl.structured_output.automata import model_vocabulary
from minisgl.tokenizer.load_tokenizer import load_decoder, load_tokenizer
from minisgl.tokenizer.text import TextTokenizer
from tokenizer import small

USER = [{"role": "user", "content": "x"}]


def folder_with(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_encode_as_the_library_does(qwen: Tokenizer, qwen_path: Path, text: str) -> None:
    ids = loaded(qwen_path).encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == qwen.encode(text).ids
    assert loaded(qwen_path).decode(ids) == qwen.decode(qwen.encode(text).ids)


def loaded(path: Path, cache: dict[Path, TextTokenizer] = {}) -> TextTokenizer:  # noqa: B006 - one load for all
    if path not in cache:
        cache[path] = TextTokenizer.from_folder(path)
    return cache[path]


def test_special_tokens_are_added_to_plain_text_only_if_asked_for(tmp_path: Path) -> None:
    ours = TextTokenizer.from_folder(folder_with(tmp_path, small.llama()))
    assert ours.encode("he").tolist() == [1, *ours.encode("he", add_special_tokens=False).tolist()]
    assert ours.decode(ours.encode("he")) == "he"
    assert ours.decode(ours.encode("he"), skip_special_tokens=False).startswith("<s>")


def test_the_first_token_may_be_a_part_of_a_character(qwen_path: Path) -> None:
    ours = loaded(qwen_path)
    for text in ("abc", " x", "\U0001f389 ok", "\u0e53", "<|im_start|>"):
        ids = ours.encode(text)
        first = ours.first_token(ids)
        assert text.encode().startswith(first)
        assert len(first) < 5 or len(ids) == 1


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_half_a_surrogate_pair_is_refused(qwen_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        loaded(qwen_path).encode(text)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        loaded(qwen_path).encode_chat([{"role": "user", "content": text}])
    assert caught.value.field == "messages"


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    tokenizer = small.llama()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    ours = TextTokenizer.from_folder(folder_with(tmp_path, tokenizer))
    assert len(ours.encode("abcdefghij")) > 10
    assert len(ours.encode("a")) < 5


def test_a_long_text(qwen_path: Path) -> None:
    text = "word " * 50_000 + "a" * 50_000
    ids = loaded(qwen_path).encode(text)
    assert loaded(qwen_path).decode(ids) == text


def test_added_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    tokenizer = small.byte_level()
    size = tokenizer.get_vocab_size()
    listed = {size: {"content": "<|end|>", "special": True}, size + 1: {"content": "<plain>", "special": False}}
    config = {"added_tokens_decoder": {str(key): value for key, value in listed.items()}}
    ours = TextTokenizer.from_folder(folder_with(tmp_path, tokenizer, config))
    assert ours.encode("a<|end|><plain>").tolist()[1:] == [size, size + 1]
    assert ours.decode([size, size + 1]) == "<plain>"
    stream = load_decoder(tmp_path).stream(skip_special_tokens=True)
    assert [stream.feed(size), stream.feed(size + 1)] == ["", "<plain>"]


def test_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    config |= {"chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}"}
    ours = TextTokenizer.from_folder(folder_with(tmp_path, small.llama(), config))
    assert ours.templates.render(USER) == "<s></s>False"


TOKEN = {"__type": "AddedToken", "content": "<s>", "lstrip": False}


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"eos_token": "</s>"}, {"eos_token": "<think>"}),
        ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "<think>"}),
        ({"eos_token": None, "bos_token": None}, {"eos_token": "</s>"}),
        ({"eos_token": None, "added_tokens_decoder": {}}, {"eos_token": "</s>"}),
        ({}, {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>"}),
        ({"bos_token": TOKEN, "image_token": "<think>"}, {}),
        ({"extra_special_tokens": {"image_token": "<think>", "turn": "</s>"}}, {}),
    ],
)
def test_which_file_names_the_special_tokens(tmp_path: Path, config: dict[str, Any], older: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    names = ("bos_token", "eos_token", "pad_token", "image_token", "turn")
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"chat_template": "".join(f"{{{{ {name} }}}} in {name};" for name in names)}
    folder_with(tmp_path, small.llama(), config)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    want = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(USER, tokenize=False)
    assert TextTokenizer.from_folder(tmp_path).templates.render(USER) == want


def test_chat_templates_are_found_in_every_place(tmp_path: Path) -> None:
    def rendered(config: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> str:
        return TextTokenizer.from_folder(folder_with(tmp_path, small.llama(), config)).templates.render(USER, tools)

    with pytest.raises(InvalidRequest, match=tmp_path.name):
        rendered({})
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered({}) == "json"
    assert rendered({"chat_template": "config"}) == "config"
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    assert rendered({"chat_template": named}) == "list"
    assert rendered({"chat_template": named}, [{}]) == "tools"
    by_name = {entry["name"]: entry["template"] for entry in named}
    assert [rendered({"chat_template": by_name}, tools) for tools in (None, [{}])] == ["list", "tools"]
    (tmp_path / "chat_template.jinja").write_text("jinja 世")
    assert rendered({"chat_template": named}, [{}]) == "jinja 世"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert rendered({}, [{}]) == "more"


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    for load in (load_tokenizer, load_decoder):
        with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
            load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    with pytest.raises(ConfigError, match=r"tokenizer\.model cannot be converted") as caught:
        TextTokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_the_packages_that_sentencepiece_models_take_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.model cannot be converted: .*pip install sentencepiece"):
        TextTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": [{"template": "x"}]}, r"chat_template in .*tokenizer_config\.json .*`name`"),
        ({"chat_template": ["x"]}, r"chat_template in .*tokenizer_config\.json"),
        ({"chat_template": {"default": 3}}, r"chat_template in .*tokenizer_config\.json"),
        ({"chat_template": 3}, r"chat_template in .*tokenizer_config\.json"),
        ({"added_tokens_decoder": {"900": {"special": True}}}, r"tokenizer_config\.json .*`content`"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"tokenizer_config\.json has no valid added_tokens"),
        ({"added_tokens_decoder": ["a"]}, r"tokenizer_config\.json has no valid added_tokens"),
        ({"added_tokens_decoder": {"1": "</s>"}}, r"tokenizer_config\.json has no valid added_tokens"),
    ],
)
def test_malformed_configurations(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = folder_with(tmp_path, small.byte_level(), config)
    with pytest.raises(ConfigError, match=message):
        TextTokenizer.from_folder(folder)
    if "no valid" in message:
        with pytest.raises(ConfigError, match=message):
            load_decoder(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_template_that_is_not_utf_8(tmp_path: Path, name: str) -> None:
    folder_with(tmp_path, small.llama())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=rf"{name} is not UTF-8"):
        TextTokenizer.from_folder(tmp_path)


def test_conversion_of_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = small.byte_level()
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": "!"}')
    ours = TextTokenizer.from_folder(tmp_path)
    assert ours.encode("hello w").tolist() == tokenizer.encode("hello w").ids
    stream = load_decoder(tmp_path).stream(skip_special_tokens=True)
    assert "".join(map(stream.feed, ours.encode("hello 世").tolist())) == "hello 世"


def test_both_ways_to_a_decoder_agree(qwen: Tokenizer, qwen_path: Path) -> None:
    decoder = load_decoder(qwen_path)
    for skip in (True, False):
        for token in [*range(2000), *range(150_000, 152_000)]:
            stream = decoder.stream(skip)
            text = stream.feed(token) + stream.flush()
            assert text == qwen.decode([token], skip_special_tokens=skip)


def test_the_decoder_of_any_kind_from_a_folder(tmp_path: Path) -> None:
    for kind, make in small.KINDS.items():
        (folder := tmp_path / kind).mkdir()
        tokenizer = make()
        stream = load_decoder(folder_with(folder, tokenizer)).stream(skip_special_tokens=True)
        ids = tokenizer.encode("hello a").ids
        assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)


def test_grammars_spell_a_converted_gguf(tmp_path: Path) -> None:
    """llguidance takes ByteFallback for the kind of the whole tokenizer: Ġ would be no space."""
    tokenizer = load_tokenizer(folder_with(tmp_path, small.converted_gguf()))
    spelt = model_vocabulary(tokenizer, tokenizer.get_vocab_size(), [])
    ids = tokenizer.encode("hello wé").ids
    assert spelt.decode_bytes(ids) == "hello wé".encode()
    assert tokenizer.decode(ids) == "hello wé"


@pytest.mark.parametrize("module", ["minisgl.tokenizer.tokenizer_worker", "minisgl.tokenizer.detokenizer_worker"])
def test_no_heavy_imports(qwen_path: Path, module: str) -> None:
    program = f"""
import sys
import {module}
from pathlib import Path
from minisgl.tokenizer.load_tokenizer import load_decoder, load_tokenizer
from minisgl.tokenizer.detokenizer import Detokenizer
folder = Path({str(qwen_path)!r})
load_tokenizer(folder), Detokenizer(load_decoder(folder))
print([name for name in ("torch", "transformers", "fastapi", "safetensors") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stdout.strip() == "[]"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(minisgl.__file__).parents[1])}

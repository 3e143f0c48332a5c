"""Added tokens are those that transformers has, wherever the folder says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from minisgl.config import ConfigError
from minisgl.tokenizer.chat_template import ChatTemplates
from minisgl.tokenizer.load_tokenizer import load_decoder
from minisgl.tokenizer.text import TextTokenizer
from tokenizer import small

TEXTS = ["<s>he</s> a", "a <|im_start|> he\n<|im_end|>  b", "<think>he</think>", "a</think> <|im_end|>"]
CHATML = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def written(kind: str, folder: Path, added: dict[str, dict[str, Any]], config: dict[str, Any]) -> Path:
    """A tokenizer with CHATML in its ordinary vocabulary; of these, `added` are added tokens with these flags."""
    raw = json.loads(small.KINDS[kind]().to_str())
    vocabulary = raw["model"]["vocab"]
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in ("<s>", "</s>", "<unk>")]
    for token in raw["added_tokens"]:
        vocabulary.setdefault(token["content"], token["id"])
    vocabulary.update({content: len(vocabulary) + at for at, content in enumerate(CHATML)})
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    own = {token["content"]: token for token in raw["added_tokens"]}
    for content, changes in added.items():
        own[content] = {"id": vocabulary[content], "content": content, **flags, **changes}
    raw["added_tokens"] = sorted(own.values(), key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    if listed := config.get("added_tokens_decoder"):
        config = config | {
            "added_tokens_decoder": {
                vocabulary[content]: {"content": content, **flags, **changes} for content, changes in listed.items()
            }
        }
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


PLAIN: dict[str, dict[str, Any]] = {"<s>": {}, "</s>": {}}
LISTED: dict[str, dict[str, Any]] = {**PLAIN, "<|im_start|>": {}, "<|im_end|>": {}}
CASES: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "nothing more": (LISTED, {"eos_token": "</s>"}),
    "listed": ({}, {"added_tokens_decoder": LISTED}),
    "listed, not special": ({}, {"added_tokens_decoder": {**PLAIN, "<think>": {"special": False}}}),
    "one of them listed": ({}, {"added_tokens_decoder": {"<|im_end|>": {}}}),
    "listed as special only there": ({"<|im_end|>": {"special": False}}, {"added_tokens_decoder": LISTED}),
    "special only in tokenizer.json": (LISTED, {"added_tokens_decoder": {"<|im_end|>": {"special": False}}}),
    "taking spaces only there": (LISTED, {"added_tokens_decoder": {"<|im_end|>": {"rstrip": True, "lstrip": True}}}),
    "the end token": ({}, {"eos_token": "<|im_end|>"}),
    "the end token, an object": ({}, {"pad_token": {"__type": "AddedToken", "content": "<|im_end|>"}}),
    "the end token, not special": ({"<|im_end|>": {"special": False}}, {"eos_token": "<|im_end|>"}),
    "the end token, taking spaces": (
        {},
        {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": True, "rstrip": True}},
    ),
    "split": (LISTED, {"split_special_tokens": True}),
    "a key that means nothing": (LISTED, {"added_tokens": ["<|im_end|>"]}),
    "another name": ({}, {"turn_token": "<|im_end|>"}),
    "additional": ({}, {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
    "additional, not special": ({"<think>": {"special": False}}, {"additional_special_tokens": ["<think>"]}),
    "extra": ({}, {"extra_special_tokens": ["<|im_end|>"], "additional_special_tokens": ["<think>"]}),
    "extra by name": ({}, {"extra_special_tokens": {"turn": "<|im_end|>"}}),
}


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize(("added", "config"), CASES.values(), ids=CASES)
def test_added_tokens_are_those_of_transformers(
    tmp_path: Path, kind: str, added: dict[str, dict[str, Any]], config: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    folder = written(kind, tmp_path, added, config)
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextTokenizer.from_folder(folder)
    decoder = load_decoder(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == ids
        for skip in (True, False):
            stream = decoder.stream(skip)
            want = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip) == want
            assert "".join(map(stream.feed, ids)) + stream.flush() == want


def test_a_configuration_that_gives_a_tokens_id_to_another_is_passed_over(tmp_path: Path) -> None:
    folder = written("byte_level", tmp_path, LISTED, {})
    raw = {"added_tokens_decoder": {"5": {"content": "<|renamed|>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))
    ours = TextTokenizer.from_folder(folder)
    stream = load_decoder(folder).stream(skip_special_tokens=False)
    assert stream.feed(5) == ours.decode([5]) != "<|renamed|>"


def test_an_older_list_of_added_tokens(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = written("byte_level", tmp_path, PLAIN, {"pad_token": "<pad>"})
    size = TextTokenizer.from_folder(folder).tokenizer.get_vocab_size()
    (folder / "added_tokens.json").write_text(json.dumps({"[NEW]": size + 1, "<pad>": size, "<think>": size - 2}))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), TextTokenizer.from_folder(folder)
    ids = theirs("a<pad>b [NEW]<think>")["input_ids"]
    assert ours.encode("a<pad>b [NEW]<think>").tolist() == ids
    stream = load_decoder(folder).stream(skip_special_tokens=True)
    assert "".join(map(stream.feed, ids)) == theirs.decode(ids, skip_special_tokens=True) == "ab [NEW]<think>"
    (folder / "added_tokens.json").write_text('{"[NEW]": "x"}')
    with pytest.raises(ConfigError, match=r"added_tokens\.json"):
        TextTokenizer.from_folder(folder)


LISTS: dict[str, dict[str, int]] = {
    "a gap before": {"[NEW]": 275, "[TOO]": 273},
    "gaps between": {"[NEW]": 270, "[TOO]": 275},
    "an id of the vocabulary": {"[NEW]": 5, "[TOO]": 270},
    "an id twice": {"[TOO]": 272, "[NEW]": 272},
    "a token of the vocabulary": {"[NEW]": 300, "<think>": 400},
}


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
def test_ids_of_listed_tokens_are_those_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, listed: dict[str, int]
) -> None:
    from transformers import AutoTokenizer

    folder = written("byte_level", tmp_path, LISTED, {})
    by_id = {token_id: {"content": content} for content, token_id in listed.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": by_id}
    (folder / file).write_text(json.dumps(listed if file == "added_tokens.json" else config))
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextTokenizer.from_folder(folder)
    assert len(caplog.records) == 1
    assert re.search(r"'\[(NEW|TOO)\]' has id 27", caplog.text)
    ids = theirs("a[NEW]b[TOO]<think>")["input_ids"]
    assert ours.encode("a[NEW]b[TOO]<think>").tolist() == ids
    stream = load_decoder(folder).stream(skip_special_tokens=True)
    assert "".join(map(stream.feed, ids)) + stream.flush() == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_that_is_listed_twice_has_one_id(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = written("byte_level", tmp_path, LISTED, {})
    by_id = {271: {"content": "[NEW]"}, 275: {"content": "[NEW]"}, 276: {"content": "[TOO]"}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": by_id}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = TextTokenizer.from_folder(folder).encode("a[NEW]b[TOO]").tolist()
    assert ids == AutoTokenizer.from_pretrained(folder)("a[NEW]b[TOO]")["input_ids"]
    stream = load_decoder(folder).stream(skip_special_tokens=True)
    assert "".join(map(stream.feed, ids)) + stream.flush() == "a[NEW]b[TOO]"


def with_an_empty_token() -> Tokenizer:
    """Return a tokenizer whose normalizer leaves nothing of an added token, which is then found everywhere."""
    tokenizer = small.words()
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.add_tokens([AddedToken("\u200d", normalized=True)])
    return tokenizer


def test_an_added_token_that_is_nothing_when_normalized(tmp_path: Path) -> None:
    tokenizer = with_an_empty_token()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    joiner = tokenizer.token_to_id("\u200d")
    assert TextTokenizer.from_folder(tmp_path).encode("世 a\u200db").tolist() == [4, 1, joiner, 2]


def test_a_panic_of_the_library_is_an_error_of_the_request() -> None:
    ours = TextTokenizer(with_an_empty_token(), ChatTemplates({}, {}))
    with pytest.raises(RuntimeError, match="panicked"):
        ours.encode("世")

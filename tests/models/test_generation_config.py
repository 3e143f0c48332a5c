"""Sampling defaults of generation_config.json: where they are read, what is logged, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.config import ConfigError, SamplingDefaults
from minisgl.models.config.generation_config import load_sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


def folder_with(path: Path, content: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(content))
    return path


def test_the_models_file_is_read_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    defaults = load_sampling_defaults("auto", folder_with(tmp_path, QWEN | {"max_new_tokens": 2048}))
    assert defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=2048)
    assert defaults.fields == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (line,) = caplog.messages
    assert "temperature 0.6, top_k 20, top_p 0.95, max_new_tokens 2048; --generation-config vllm" in line


def test_without_sampling_values_nothing_is_set_or_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert load_sampling_defaults("auto", tmp_path) == SamplingDefaults()
    folder = folder_with(tmp_path, {"do_sample": False, "temperature": None, "eos_token_id": 5})
    assert load_sampling_defaults("auto", folder) == SamplingDefaults()
    assert caplog.messages == []


def test_vllm_switches_the_file_off_and_a_folder_takes_its_place(tmp_path: Path) -> None:
    model, other = folder_with(tmp_path / "model", QWEN), folder_with(tmp_path / "other", {"min_p": 0.1})
    assert load_sampling_defaults("vllm", model) == SamplingDefaults()
    assert load_sampling_defaults(str(other), model) == SamplingDefaults(min_p=0.1)
    with pytest.raises(ConfigError, match="--generation-config must be auto, vllm or a folder"):
        load_sampling_defaults(str(tmp_path), model)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"temperature": "0.6"}, "temperature"),
        ({"temperature": 3}, "temperature must be at most 2"),
        ({"top_k": 2**31}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1"),
        ([], "object"),
    ],
)
def test_values_that_no_request_may_have_end_the_start(values: object, words: str, tmp_path: Path) -> None:
    """Otherwise every request would be refused for what its client never sent."""
    with pytest.raises(ConfigError, match=f"generation_config.json: .*{words}.*--generation-config vllm"):
        load_sampling_defaults("auto", folder_with(tmp_path, values))

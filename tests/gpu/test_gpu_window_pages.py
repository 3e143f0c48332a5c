"""Freeing pages before a window on a GPU changes no log probability against an engine that keeps all pages.

Weights are random, with real shapes, in 16 bits; prompts run in chunks, answers in captured graphs. Both engines run
the same batches, so the test would show if a kernel read a page that by now belongs to another request.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minisgl.engine.parts
from gpu.test_gpu_families import SHAPES, SMALL
from minisgl import LLM, SamplingParams
from support.tiny_tokenizer import save_byte_tokenizer

pytestmark = pytest.mark.gpu

LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 8192,
}
LENGTH, COUNT, CHUNK = 3000, 4, 512


@pytest.mark.parametrize("kind", ["exaone4", "gemma3", "gpt-oss", "olmo3"])
def test_log_probabilities_are_those_of_one_page_table(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SHAPES[kind] | SMALL | LAYERS
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_byte_tokenizer(tmp_path, config["vocab_size"])
    windowed, counts = log_probabilities(tmp_path)
    assert counts["window_pages_given_back"] > 100
    assert counts["window_pages"] * 64 < COUNT * LENGTH
    monkeypatch.setattr(minisgl.engine.parts, "leaves_pages_behind", lambda *_: False)
    together, _ = log_probabilities(tmp_path)
    for one, other in zip(windowed, together, strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)


def log_probabilities(folder: Path) -> tuple[list[Any], dict[str, int]]:
    """Log-probabilities of each prompt's and answer's tokens, and the scheduler's counts."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(LENGTH - 7 * row)] for row in range(COUNT)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    with LLM(
        str(folder),
        "bfloat16",
        device="cuda",
        use_dummy_weight=True,
        max_seq_len_override=2 * LENGTH,
        num_page_override=400,
        max_extend_tokens=CHUNK,
        max_running_req=8,
        window_ratio=0.25,
    ) as llm:
        answers = llm.generate(prompts, params)
        llm.check_idle()
        counts = llm.loop.scheduler.counts()
    scores = [[entry.chosen.logprob for entry in answer["prompt_logprobs"] if entry] for answer in answers]
    return scores + [[entry.chosen.logprob for entry in answer["logprobs"]] for answer in answers], counts

"""A prompt for which the model computes NaN spoils no other, whatever an attention kernel reads of a page's rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from support.small_models import save_qwen3, spoil_token

pytestmark = pytest.mark.gpu

VOCAB = 2000
BAD = 700  # token whose embedding is NaN


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_qwen3(
        tmp_path_factory.mktemp("damaged"), weights=True, vocab_size=VOCAB, num_layers=2, tie_word_embeddings=False
    )
    spoil_token(folder, BAD)
    return folder


@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
@pytest.mark.parametrize("backend", ["auto", "fa", "fi", "varlen", "torch"])
def test_a_bad_prompt_ends_alone(damaged: Path, backend: str, page_size: int) -> None:
    """Good prompts get the pages that bad ones filled, and share their steps."""
    if backend == "fi":
        pytest.importorskip("flashinfer")
    good = [[2 + (first * 7 + index) % 600 for index in range(19 + 40 * first)] for first in range(6)]
    bad = [[BAD, *prompt] * 3 for prompt in good]
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    with LLM(
        str(damaged), device="cuda", attention_backend=backend, page_size=page_size, num_page_override=8192 // page_size
    ) as llm:
        for prompts in (good, bad, good, [*bad[:3], *good, *bad[3:]], good):
            reasons = [answer["finish_reason"] for answer in llm.generate(prompts, params)]
            assert reasons == ["error" if BAD in prompt else "length" for prompt in prompts]
        llm.check_idle()

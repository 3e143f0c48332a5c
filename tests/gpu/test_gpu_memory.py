"""Memory on a GPU: the pool takes what is left, a full load stays within the ratio, and advice on failure holds."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from support.small_models import save_qwen3

pytestmark = pytest.mark.gpu

VOCAB = 150_000  # logits are a large part of what a step takes
RATIO = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(
        tmp_path_factory.mktemp("memory"),
        weights=False,
        vocab_size=VOCAB,
        num_layers=6,
        max_position_embeddings=40960,
    )


def used_ratio() -> float:
    free, total = torch.cuda.mem_get_info()
    return 1.0 - free / total


def test_a_full_load_stays_within_the_ratio(folder: Path) -> None:
    torch.cuda.empty_cache()
    outside = used_ratio()
    with LLM(str(folder), device="cuda", use_dummy_weight=True, memory_ratio=RATIO) as llm:
        assert used_ratio() < RATIO + 0.002
        # 256 decodes and prefills of 8192 tokens, every kind of sampling.
        params = [
            SamplingParams(temperature=0.0 if index % 3 == 0 else 0.8, top_p=0.9, max_tokens=40, ignore_eos=True)
            for index in range(300)
        ]
        llm.generate([[index % 97, *range(1, 100 + 3 * index)] for index in range(300)], params)
        llm.check_idle()
        assert used_ratio() < RATIO + 0.01
        # What was measured is no gross overestimate: what is kept free is small.
        assert used_ratio() > RATIO - 0.05 - outside


def test_a_closed_llm_gives_its_memory_back_though_its_name_is_kept(folder: Path) -> None:
    before = used_ratio()
    llm = LLM(str(folder), device="cuda", use_dummy_weight=True, memory_ratio=RATIO)
    assert used_ratio() > before + 0.1
    llm.close()
    assert used_ratio() < before + 0.005  # kernels and libraries stay loaded
    assert answers(folder, memory_ratio=RATIO)


def refusal(folder: Path, **options: object) -> str:
    """Return the error of an LLM that does not start, without its traceback, which would keep the weights in memory."""
    text = ""
    try:
        LLM(str(folder), device="cuda", use_dummy_weight=True, **options).close()
    except ConfigError as error:
        text = str(error)
    gc.collect()
    torch.cuda.empty_cache()
    return text


def answers(folder: Path, **options: object) -> bool:
    with LLM(str(folder), device="cuda", use_dummy_weight=True, **options) as llm:
        return len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0]["token_ids"]) == 3


def test_the_advised_ratio_holds(folder: Path) -> None:
    text = refusal(folder, max_running_req=16, memory_ratio=0.005)
    assert "too little memory for the KV cache" in text
    advice = re.search(r"--memory-ratio (\d\.\d+)$", text)
    assert advice, text
    assert answers(folder, max_running_req=16, memory_ratio=float(advice[1]))


def test_the_advised_pages_hold(folder: Path) -> None:
    text = refusal(folder, max_running_req=16, memory_ratio=RATIO, num_page_override=10**6)
    advice = re.search(r"--num-pages (\d+)", text)
    assert advice, text
    pages = int(advice[1]) * 99 // 100  # two starts do not measure the same to the byte
    assert answers(folder, max_running_req=16, memory_ratio=RATIO, num_page_override=pages)


def test_a_chunk_too_large(folder: Path) -> None:
    text = refusal(folder, max_extend_tokens=256 * 40960, max_running_req=256)
    assert re.search(r"a prefill of \d+ tokens does not fit.*--max-prefill-length", text), text


def take_free_memory(leave: int) -> list[torch.Tensor]:
    """Occupy the GPU's memory except for about `leave` bytes."""
    torch.cuda.empty_cache()
    ballast: list[torch.Tensor] = []
    for size in (1 << 30, 32 << 20):
        while torch.cuda.mem_get_info()[0] > leave + size:
            ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return ballast


def test_prefills_that_find_no_memory_are_retried_in_parts(folder: Path) -> None:
    """A prefill of 8192 tokens takes more than what is left; one of 1024, from a graph, does not."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[index % 97, *range(1, 1000)] for index in range(24)]
    with LLM(str(folder), device="cuda", use_dummy_weight=True, memory_ratio=RATIO, max_running_req=32) as llm:
        llm.generate(prompts, params)
        assert llm.loop.scheduler.failed_steps == 0
        llm.loop.scheduler.flush_cache()
        ballast = take_free_memory(leave=64 << 20)
        answers = llm.generate(prompts, params)
        assert llm.loop.scheduler.failed_steps >= 1
        assert [(answer["finish_reason"], len(answer["token_ids"])) for answer in answers] == [("length", 8)] * 24
        llm.check_idle()
        ballast.clear()
        llm.loop.scheduler.flush_cache()
        assert [answer["finish_reason"] for answer in llm.generate(prompts, params)] == ["length"] * 24
        llm.check_idle()


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_long_prefixes_and_log_probabilities_stay_within_the_ratio(folder: Path, attention: str) -> None:
    """Chunks of 4096 tokens after up to 28,000, one after a cached prefix, and all log probabilities of a prompt."""
    torch.cuda.empty_cache()
    with LLM(
        str(folder),
        device="cuda",
        use_dummy_weight=True,
        memory_ratio=RATIO,
        max_running_req=16,
        max_extend_tokens=4096,
        attention_backend=attention,
    ) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        prompt = [1 + index % 997 for index in range(30_000)]
        llm.generate([prompt], params)
        (again,) = llm.generate([[*prompt, *range(1, 5000)]], params)
        assert again["cached_tokens"] > 29_000
        scored = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=20, prompt_logprobs=20)
        llm.generate([prompt[:9000], *([index] * 500 for index in range(1, 16))], scored)
        assert llm.loop.scheduler.failed_steps == 0
        llm.check_idle()
        assert used_ratio() < RATIO + 0.01

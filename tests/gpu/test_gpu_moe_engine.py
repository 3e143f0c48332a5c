"""Qwen3-MoE on a GPU: graphs and eager steps of the expert kernels against transformers, in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.test_gpu_engine import VOCAB, generate, prompts
from support.gpus import in_new_process, over_gpus
from support.tiny_tokenizer import save_byte_tokenizer

pytestmark = pytest.mark.gpu


def save_model(path: Path, *, num_experts: int, top_k: int) -> Path:
    """Three layers of small experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        dtype="bfloat16",
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    save_byte_tokenizer(path, VOCAB)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3_moe"), num_experts=16, top_k=4)


def regrets(folder: Path, answers: list[list[int]]) -> torch.Tensor:
    """Return the distance of each chosen token's logit from the oracle's best."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    found = []
    for prompt, answer in zip(prompts() * 2, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None]).squeeze(1)
        found.append(logits.max(dim=1).values - chosen)
    return torch.cat(found)


@pytest.mark.parametrize("graph_max_bs", [0, 40])
def test_greedy_agrees_with_transformers(folder: Path, graph_max_bs: int) -> None:
    found = regrets(folder, generate(folder, attention_backend="fa", cuda_graph_max_bs=graph_max_bs))
    # An expert chosen at a near tie of the router moves the logits further than rounding does, but seldom.
    assert (found > 0.15).float().mean() < 0.02
    assert found.max() < 1.5


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "divided"])
@over_gpus(2, 4)
def test_experts_over_ranks_agree_with_transformers(folder: Path, tp_size: int, *, whole: bool) -> None:
    """A rank has some experts as a whole, or a part of every expert's intermediate size."""
    options = {"attention_backend": "fa", "tp_size": tp_size, "enable_expert_parallel": whole}
    found = regrets(folder, in_new_process(generate, folder, **options))
    assert (found > 0.15).float().mean() < 0.02
    assert found.max() < 1.5


def test_experts_that_no_kernel_supports_run_without_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Torch computes them: it reads how many tokens each expert gets, which a graph cannot hold."""
    folder = save_model(tmp_path, num_experts=40, top_k=33)
    found = regrets(folder, generate(folder, attention_backend="fa"))
    assert "steps run without CUDA graphs: these cannot capture the experts" in caplog.text
    assert (found > 0.15).float().mean() < 0.02

"""Tensor parallelism on the CPU: the logits of one rank, on every rank, each reading only its share."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.distributed import SingleRank, TPGroup
from minisgl.distributed.group import Summed
from minisgl.distributed.shared_memory import SharedMemoryTP
from minisgl.kernel.base import Norm
from minisgl.kernel.torch_ops import TorchOps
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.load_config import load_model_config
from minisgl.models.weights.checkpoint import SafetensorsTensor
from minisgl.models.weights.loading import build_model, load_model
from models.harness import Harness
from models.quantized import save_quantized
from models.tiny import VOCAB

KINDS = (
    "llama-bias",
    "llama-tied",
    "qwen2-window",
    "qwen3",
    "qwen3-moe",
    "gemma3",
    "olmo2",
    "phi3-partial",
    "granite",
    "ministral3",
    "glm4",
    "glm4-moe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "gemma4",
    "gemma4-parts",
    "qwen3-next",
    "qwen3.5-moe",
)
QUANTIZED = ("fp8 blocks", "gptq desc_act")
# Models whose experts ranks hold whole, 6 or 8 of them: three ranks have an equal number or not.
WHOLE = ("qwen3-moe", "glm4-moe", "gpt-oss", "deepseek-v2", "deepseek-v3", "gemma4-parts", "qwen3.5-moe")
SIZES = {
    **dict.fromkeys(KINDS, (2, 3)),
    **dict.fromkeys((f"{kind} whole" for kind in WHOLE), (3,)),
    **dict.fromkeys(QUANTIZED, (2, 4)),
}  # ranks by model
# Models with norms after their blocks, or with other additions to the residual.
WHOLE_RESIDUAL = ("gemma3", "olmo2", "granite", "glm4", "gemma4", "gemma4-parts")
PROMPTS = ([5, 198, 0, 17, 101, 66, 67, 133, 134, 2], list(range(40, 61)))


class DividingTP(SharedMemoryTP):
    """Divides the residual of steps of 10 tokens or more, and makes NaN of what a model must not read."""

    memory: torch.Tensor | None = None  # [2, tokens, width]: parts and results

    def enable_sequence_parallel(self, tokens: int, width: int, dtype: torch.dtype) -> bool:
        self.memory = torch.full((2, tokens, width), torch.nan, dtype=dtype)
        return True

    def part_like(self, residual: torch.Tensor) -> torch.Tensor | None:
        return None if self.memory is None or len(residual) < 10 else self.memory[0, : len(residual)]

    def all_reduce_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> Summed:
        if self.memory is None or (part := self.part_like(residual)) is None:
            return super().all_reduce_norm(x, residual, norm)
        share = -(-len(x) // self.size)
        own = slice(self.rank * share, (self.rank + 1) * share)
        total = self.all_reduce(x.clone(), residual)[own].clone()
        part.fill_(torch.nan)
        residual.fill_(torch.nan)
        residual[own] = total
        sent = torch.zeros_like(residual)
        sent[own] = total if norm is None else TorchOps().rms_norm(total, norm)
        results = self.memory[1, : len(x)].copy_(self.all_reduce(sent))
        return (results, None) if norm is None else (residual, results)


def logits_of(folder: Path, tp: TPGroup, *, whole_experts: bool = False, divided: bool = False) -> torch.Tensor:
    """A prefill of two rows, a mixed step and a decode step: [9, vocab]."""
    config = load_model_config(folder)
    if whole_experts:
        config = config.with_whole_experts()
    model = load_model(config, folder, tp=tp, dtype=torch.float32, device=torch.device("cpu"))
    if divided:
        tp.enable_sequence_parallel(20, config.hidden_size, torch.float32)
    harness = Harness(model, num_pages=20)
    a, b = (harness.add(tokens) for tokens in PROMPTS)
    plans = [[(a, 8), (b, 5)], [(b, 15), (a, 1)], [(a, 1), (b, 1)]]
    return torch.cat([harness.step(plan) for plan in plans])


def run_rank(rank: int, rendezvous: str, folders: dict[str, Path], out: Path) -> None:
    """Four ranks, then fewer of the same processes: starting one costs more than all it does."""
    torch.set_num_threads(1)
    groups = {
        size: DividingTP.connect(rank=rank, size=size, init_method=f"{rendezvous}-{size}", timeout_s=60)
        for size in (4, 3, 2)
        if rank < size
    }
    four = groups[4]
    results: dict[str, Any] = {
        f"{kind} {size}": logits_of(folders[kind.removesuffix(" whole")], tp, whole_experts=kind.endswith(" whole"))
        for size, tp in groups.items()
        for kind, sizes in SIZES.items()
        if size in sizes
    }
    divided = [kind for kind in KINDS if kind not in WHOLE_RESIDUAL] if rank < 3 else []
    results |= {f"{kind} divided": logits_of(folders[kind], groups[3], divided=True) for kind in divided}
    half = torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16)
    results["sum"] = four.all_reduce(half.clone())
    results["gathered"] = four.all_gather(half)
    generator = torch.Generator().manual_seed(rank)
    long = torch.randn(3, 200_001, generator=generator)  # pieces of shared memory, the last of them not full
    results["long sum"] = four.all_reduce(long.clone(), torch.ones_like(long))
    results["long gathered"] = four.all_gather(long)
    results["smallest"], results["largest"] = four.smallest(10 - rank), four.largest(10 - rank)
    torch.save(results, out / f"{rank}.pt")
    for group in groups.values():
        group.close()


def test_logits_do_not_depend_on_the_number_of_ranks(saved: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    """199 tokens and 2 KV heads divide by neither 2 nor 3 ranks alike: padded and replicated. Shares of the quantized
    models end inside blocks and groups.
    """
    folders = {kind: saved(kind)[1] for kind in KINDS}
    for index, name in enumerate(QUANTIZED):
        (tmp_path / str(index)).mkdir()
        folders[name], _ = save_quantized(tmp_path / str(index), "llama", name)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch"])  # importing torch takes seconds: once for all ranks
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    ranks = [
        server.Process(target=run_rank, args=(rank, rendezvous, folders, tmp_path), daemon=True) for rank in range(4)
    ]
    for process in ranks:
        process.start()
    want = {kind: logits_of(folder, SingleRank()) for kind, folder in folders.items()}
    for process in ranks:
        process.join(100)
    for process in ranks:
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0, 0, 0]

    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for kind, sizes in SIZES.items():
        for size in sizes:
            logits = results[0][f"{kind} {size}"]
            whole = want[kind.removesuffix(" whole")]
            assert logits.shape == whole.shape == (6, VOCAB)
            assert (logits - whole).abs().max() < 1e-4 * whole.abs().max()
            for other in results[1:size]:
                assert torch.equal(other[f"{kind} {size}"], logits)
    for kind, whole in want.items():
        if f"{kind} divided" in results[0]:
            assert all(
                (result[f"{kind} divided"] - whole).abs().max() < 1e-4 * whole.abs().max() for result in results[:3]
            )
    parts = [torch.randn(3, 200_001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    for result in results:
        assert torch.equal(result["sum"], torch.full((2, 3), 10.0, dtype=torch.bfloat16))
        assert result["gathered"].tolist() == [[1.0] * 3 + [2.0] * 3 + [3.0] * 3 + [4.0] * 3] * 2
        assert torch.equal(result["long sum"], sum(parts) + 1)
        assert torch.equal(result["long gathered"], torch.cat(parts, dim=1))
        assert (result["smallest"], result["largest"]) == (7, 10)


WAITS = """
import sys
from minisgl.distributed.shared_memory import SharedMemoryTP
SharedMemoryTP.connect(rank=0, size=2, init_method=sys.argv[1], check=lambda: print("waits", flush=True))
"""


def test_a_rank_that_is_killed_while_it_waits_for_others_leaves_nothing_outside_the_run_dir(tmp_path: Path) -> None:
    run_dir, others = tmp_path / "run", tmp_path / "tmp"
    for folder in (run_dir, others):
        folder.mkdir()
    command = [sys.executable, "-c", WAITS, f"file://{run_dir / 'rendezvous'}"]
    environment = os.environ | {"TMPDIR": str(others)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        process.kill()
    assert list(others.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_is_divided_only_if_blocks_do_no_more_than_add_to_it(
    saved: Callable[[str], tuple[Any, Path]], kind: str
) -> None:
    config = load_model_config(saved(kind)[1])
    model = build_model(config, tp=SingleRank(), dtype=torch.float32, device=torch.device("meta"))
    assert model.supports_sequence_parallel == (kind not in WHOLE_RESIDUAL)


class Rank:
    """One of several ranks without its peers, which suffices to build and load a model."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    all_gather = all_reduce


@pytest.mark.parametrize(("kind", "whole"), [("llama", False), ("qwen3-moe", False), ("qwen3-moe", True)])
def test_a_rank_reads_only_what_it_keeps(
    saved: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, kind: str, *, whole: bool
) -> None:
    _, folder = saved(kind)
    config = load_model_config(folder)
    if whole:
        config = config.with_whole_experts()
    read = SafetensorsTensor.read
    seen: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        tensor = read(*args)
        seen.append(tensor.numel())
        return tensor

    monkeypatch.setattr(SafetensorsTensor, "read", counted)
    sizes = []
    for tp in (SingleRank(), Rank(1, 2)):
        seen.clear()
        load_model(config, folder, tp=tp, dtype=torch.float32, device=torch.device("cpu"))
        sizes.append(sum(seen))
    assert sizes[1] < 0.51 * sizes[0]


def test_indivisible_sizes_are_refused(saved: Callable[[str], tuple[Any, Path]]) -> None:
    config = load_model_config(saved("llama")[1])
    with pytest.raises(UnsupportedModel, match="over 4 ranks does not divide the model's attention heads"):
        build_model(config, tp=Rank(0, 4), dtype=torch.float32, device=torch.device("cpu"))

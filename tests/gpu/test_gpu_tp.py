"""Tensor parallelism on two and four GPUs: their answers are those of one, and an LLM on them can be closed."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from minisgl import LLM, SamplingParams
from minisgl.config import ServerConfig
from minisgl.core import Batch
from minisgl.distributed.nccl import NcclTP
from minisgl.engine.engine import Engine
from minisgl.engine.state import SlotState
from minisgl.kernel.base import Norm
from minisgl.llm.keywords import read_settings
from minisgl.models.hub import demo_folder
from minisgl.models.load_config import load_engine_model
from minisgl.sampling_params import Grammar, SamplingFlags
from support.gpus import in_new_process, over_gpus, sum_over_ranks
from support.prefill_graphs import capture_all_prefills
from support.unclosed import WAYS, run_unclosed

if TYPE_CHECKING:  # needs CUDA's packages
    from minisgl.kernel.cuda_ops import CudaOps

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
PROMPTS = ["Hello", "a b c", "What is Minisgl?", "Write a word.", "1 2 3 4 5"] * 4


ROW = 5120  # values of a row of states
# Rows of (slot, first position, tokens) of the steps of `run_long_steps`: prompts, chunks, decodes among them.
LONG_STEPS = (
    [(0, 0, 600)],
    [(1, 0, 7), (2, 0, 1), (3, 0, 300)],
    [(0, 600, 300), (2, 1, 1), (1, 7, 211)],
)


def run_rank(rank: int, size: int, folder: Path) -> None:
    """Run one rank's part of the test of the sums, and save its results."""
    from minisgl.kernel.collectives import all_reduce
    from minisgl.kernel.cuda_ops import CudaOps

    all_reduce.LONG_BYTES[size] = 16 << 20
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tp = NcclTP.connect(
        rank=rank, size=size, init_method=f"file://{folder / 'rendezvous'}", device=device, timeout_s=8.0
    )
    generator = torch.Generator(device)

    def values(seed: int, rows: int) -> list[torch.Tensor]:
        """Return the values of all ranks."""
        generator.manual_seed(seed)
        return [torch.randn((rows, ROW), device=device, generator=generator).bfloat16() for _ in range(size)]

    wrong: list[Any] = []
    for rows in (1, 2, 3, 8, 64, 100, 410, 2, 1):  # 10 KB to 4 MB: more than one shot sums over 4 ranks
        parts = values(rows, rows)
        ours, nccl = tp.all_reduce(parts[rank].clone()), parts[rank].clone()
        dist.all_reduce(nccl)
        # NCCL rounds after each addition, so it has the bits of the exact sum only with two ranks.
        as_nccl = torch.equal(ours, nccl) if size == 2 else torch.allclose(ours, nccl, rtol=0.02, atol=0.1)
        if not (as_nccl and torch.equal(ours, sum_over_ranks(parts))):
            wrong.append(f"{rows} rows")
    used = tp.pushes
    ops, norm = CudaOps(device), Norm(torch.full((ROW,), 1.5, device=device, dtype=torch.bfloat16), 1e-6)
    for rows in (1, 9, 64, 410):
        parts = values(rows, rows + 1)
        residual = parts[0][:-1].contiguous()
        total, normed = tp.all_reduce_norm(parts[rank][1:].clone(), residual, norm)
        wanted = sum_over_ranks(parts)[1:] + residual
        if not torch.equal(total, wanted) or (
            normed is not None and not torch.equal(normed, ops.rms_norm(wanted, norm))
        ):
            wrong.append(f"norm of {rows} rows")
    weight = values(7, 2560)[rank].view(ROW, 2560)
    for rows in (1, 8, 2, 5):
        x, residual = values(rows, rows)[rank][:, :2560].contiguous(), values(rows + 1, rows)[0]
        wanted = tp.all_reduce(ops.linear(x, weight), residual)
        got = tp.product_sum(x, weight, residual.clone(), norm)
        if got is None or not torch.equal(got[0], wanted) or not torch.equal(got[1], ops.rms_norm(wanted, norm)):
            wrong.append(f"product of {rows} rows")
    for rows in (1, 5, 64):
        parts = values(rows, rows)
        if not torch.equal(tp.all_gather(parts[rank], size * ROW - 8), torch.cat(parts, dim=1)[:, :-8]):
            wrong.append(f"gather of {rows} rows")

    wrong += long_sums(tp, values, ops, norm)
    wrong += [f"graphs of {rows} rows, replay {epoch}" for rows in (8, 64) for epoch in replays(tp, values, rows)]
    wrong += [f"tokens of {rows} rows" for rows in (8, 64) if not samples_sharded(tp, device, rows)]
    tp.check()
    error = ""
    if rank < size - 1:  # the last one stops
        tp.all_reduce(torch.zeros((8, ROW), device=device, dtype=torch.bfloat16))
        torch.cuda.synchronize()
        try:
            tp.check()
        except RuntimeError as late:
            error = str(late)
    torch.save((used, wrong, error), folder / f"{rank}.pt")
    while not all((folder / f"{other}.pt").exists() for other in range(size)):
        time.sleep(0.05)
    tp.abort()


def long_sums(
    tp: NcclTP, values: Callable[[int, int], list[torch.Tensor]], ops: CudaOps, norm: Norm, most: int = 4096
) -> list[str]:
    """Return which sums of many rows are wrong."""
    if not tp.enable_sequence_parallel(most, ROW, torch.bfloat16):
        return ["no long sums"]
    wrong = []
    for rows in (most, 2000, 1999, most):
        parts, residual = values(rows, rows), values(rows + 1, rows)[0]
        for one in (norm, None, norm):
            before, share = residual.clone(), -(-rows // tp.size)
            own = slice(tp.rank * share, (tp.rank + 1) * share)
            total, normed = tp.all_reduce_norm(parts[tp.rank], residual, one)
            wanted = sum_over_ranks(parts, before)
            if one is None:
                right = torch.equal(total, wanted)
            else:
                right = torch.equal(total[own], wanted[own]) and torch.equal(normed, ops.rms_norm(wanted, one))
            if not right:
                wrong.append(f"long sum of {rows} rows")
            residual = wanted
    return wrong


def replays(tp: NcclTP, values: Callable[[int, int], list[torch.Tensor]], rows: int) -> list[int]:
    """Return the replays, of 40, that end with wrong sums; each computes 65."""
    x, y, residual = (torch.zeros_like(values(0, rows)[0]) for _ in range(3))
    tp.all_reduce(x.clone(), residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(65):
            y.copy_(tp.all_reduce(x.clone(), residual))
    wrong = []
    for epoch in range(40):
        parts = values(epoch, rows + 1)
        x.copy_(parts[tp.rank][:-1])
        residual.copy_(parts[0][1:])
        graph.replay()
        if not torch.equal(y, sum_over_ranks(parts)[:-1] + residual):
            wrong.append(epoch)
    return wrong


def samples_sharded(tp: NcclTP, device: torch.device, rows: int) -> bool:
    """Return True if logits that lie on all GPUs give the tokens of whole ones, greedily and with filters."""
    from minisgl.engine.sampling.cuda_sampler import CudaSampler

    ids = 1024
    sampler, slots = CudaSampler(device), torch.arange(rows, device=device)
    shared = tp.share_rows(rows, ids, torch.bfloat16)
    assert shared is not None
    states = [SlotState(num_slots=rows, max_seq_len=64, page_size=16, scratch_page=0, device=device) for _ in range(2)]
    for state in states:
        state.seed[:rows] = slots
        state.temperature[:rows] = slots % 4 * 0.5
        state.top_k[: rows // 2] = 50
        state.top_p[: rows // 2] = 0.9
    generator, alike = torch.Generator(device).manual_seed(rows), True
    for _ in range(20):
        logits = torch.randn((rows, tp.size * ids), device=device, generator=generator).mul(4).bfloat16()
        tp.all_reduce(torch.zeros((8, ROW), device=device))  # as in a step: all ranks have sampled the one before
        shared.own.copy_(logits[:, tp.rank * ids : (tp.rank + 1) * ids])
        got = sampler.sample_sharded(shared.own, slots, states[0], tp, shared.addresses, tp.size * ids)
        flags = SamplingFlags.SAMPLED | SamplingFlags.FILTERED
        alike &= torch.equal(got, sampler.sample(logits, slots, states[1], flags))
    return alike


@over_gpus(2, 4)
def test_gpus_sum_without_nccl(tp_size: int, tmp_path: Path) -> None:
    """Sums are exact eagerly and in graphs, in one shot and in two, in 5,200 calls; sharded logits give the tokens of
    whole ones; a rank that stops is named.
    """
    multiprocessing.spawn(run_rank, args=(tp_size, tmp_path), nprocs=tp_size, join=True)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(tp_size)]
    assert [used for used, _, _ in results] == [True] * tp_size
    assert [wrong for _, wrong, _ in results] == [[]] * tp_size
    late = f"rank {tp_size - 1} did not come to an all-reduce within 8 s"
    assert [error for _, _, error in results] == [late] * (tp_size - 1) + [""]


def run_long_steps(rank: int, size: int, folder: Path, dtype: str) -> None:
    """Run one rank's part of the test of long steps: save how far their logits are from those of other sums."""
    from minisgl.kernel.collectives import all_reduce

    all_reduce.LONG_BYTES[size] = 32 << 10  # the demo model's steps of some hundred tokens are long ones
    device = torch.device("cuda", rank)  # not the current one, as in the processes of a server
    settings = {
        "model": "demo",
        "dtype": dtype,
        "attention_backend": "torch" if dtype == "float32" else "auto",
        "max_running_req": 8,
        "tp_size": size,
        "page_size": 16,
    }
    source, config, _ = read_settings(settings)
    server = ServerConfig(source=source, engine=config, model_names=("demo",)).located(demo_folder(), demo_folder())
    model = load_engine_model(demo_folder(), server.engine)
    tp = NcclTP.connect(
        rank=rank, size=size, init_method=f"file://{folder / 'rendezvous'}", device=device, timeout_s=30.0
    )
    engine = Engine(
        server.engine,
        model,
        tp=tp,
        phase=lambda _: nullcontext(),
        progress=False,
        max_prefill_tokens=1024,
        reuses_prefixes=False,
    )
    sums, runner = tp._long_sums, engine._runner
    assert sums is not None
    captures = runner.attention.prefill_graph_safe
    if captures:
        capture_all_prefills(engine)

    def fill() -> None:
        torch.manual_seed(0)
        state = runner.state
        state.tokens[:8].random_(0, model.vocab_size)
        for layer in range(model.num_layers):
            runner.kv.keys(layer).zero_()
            runner.kv.values(layer).zero_()
        width = state.page_table.shape[1]
        state.page_table[:8] = torch.randperm(engine.num_pages, device=device)[: 8 * width].view(8, width).int()

    def logits(batch: Batch, *, eager: bool) -> torch.Tensor:
        forward = runner.forward if eager else engine._forward
        return engine._queue.call(lambda: forward(batch).logits.float())

    engine._queue.call(fill)
    far: list[float] = []
    for rows in LONG_STEPS:
        slots, start_pos, query_lens = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        batch = Batch(
            step=0,
            slots=slots,
            start_pos=start_pos,
            query_lens=query_lens,
            needs_sample=np.ones(len(rows), dtype=np.bool_),
            new_pages=np.zeros((0, 3), dtype=np.int32),
        )
        tp._long_sums = None
        wanted = logits(batch, eager=True)
        tp._long_sums = sums
        found = [logits(batch, eager=eager) for eager in (True, False)]
        far += [float((one - wanted).norm() / wanted.norm()) for one in found]
    torch.save((far, captures), folder / f"{rank}.pt")
    while not all((folder / f"{other}.pt").exists() for other in range(size)):
        time.sleep(0.05)
    engine.close()
    tp.close()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02)])
@over_gpus(2, 4)
def test_long_steps_have_the_logits_of_others(tp_size: int, dtype: str, bound: float, tmp_path: Path) -> None:
    """Long sums, eagerly and from graphs, against the sums of short steps and of NCCL."""
    multiprocessing.spawn(run_long_steps, args=(tp_size, tmp_path, dtype), nprocs=tp_size, join=True)
    for rank in range(tp_size):
        far, captures = torch.load(tmp_path / f"{rank}.pt")
        assert captures == (dtype == "bfloat16")
        assert len(far) == 2 * len(LONG_STEPS)
        assert all(one < bound for one in far)  # NaN is not


def tokens_of(tp_size: int, dtype: str, attention: str) -> list[list[int]]:
    """Greedy answers, every fifth in JSON; of an LLM that is closed afterwards."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, grammar=grammar if index % 5 == 3 else None)
        for index in range(len(PROMPTS))
    ]
    with LLM("demo", dtype, tp_size=tp_size, attention_backend=attention) as llm:
        answers = llm.generate(PROMPTS, params)
        llm.check_idle()
    return [answer["token_ids"] for answer in answers]


def lose_a_rank(tp_size: int) -> None:
    with LLM("demo", "bfloat16", tp_size=tp_size, max_running_req=8) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=2))
        last = llm._ranks._children[-1]
        threading.Timer(0.3, last.process.kill).start()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"scheduler-{tp_size - 1}: it died"):
                llm.generate(PROMPTS * 20, SamplingParams(max_tokens=1000, ignore_eos=True))


@over_gpus(2, 4)
def test_a_rank_that_dies_ends_the_call_that_needs_it(tp_size: int) -> None:
    in_new_process(lose_a_rank, tp_size)


def stop_a_rank(tp_size: int) -> None:
    with LLM("demo", "bfloat16", tp_size=tp_size, max_running_req=8, hang_timeout=3.0) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=2))
        last = llm._ranks._children[-1]
        threading.Timer(0.3, last.process.send_signal, [signal.SIGSTOP]).start()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"scheduler-{tp_size - 1} hangs: it has not answered for"):
                llm.generate(PROMPTS * 20, SamplingParams(max_tokens=1000, ignore_eos=True))


@over_gpus(2, 4)
def test_a_rank_that_is_stopped_ends_the_call_that_needs_it(tp_size: int) -> None:
    """Its peers wait in kernels whose own timeout is 300 seconds."""
    in_new_process(stop_a_rank, tp_size)


def close_with_graphs_in_use(tp_size: int) -> None:
    llm = LLM("demo", "bfloat16", tp_size=tp_size, max_running_req=8, custom_all_reduce=False)
    llm.generate(PROMPTS, SamplingParams(max_tokens=2))
    graphs = llm._engine._graphs
    llm.close()
    assert graphs is not None


@over_gpus(2, 4)
def test_an_llm_closes_while_a_traceback_refers_to_its_graphs(tp_size: int) -> None:
    """Without our all-reduce its graphs have NCCL's collectives, and the end of NCCL's group waits for such graphs."""
    in_new_process(close_with_graphs_in_use, tp_size)


def sampled_tokens_of(tp_size: int, *, custom_all_reduce: bool) -> list[list[int]]:
    """Answers of the ranks: plain, filtered, greedy, with penalties, with log-probabilities."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
        {"frequency_penalty": 0.5},
        {"min_p": 0.05, "logprobs": 3},
    )
    params = [
        SamplingParams(**{"temperature": 0.9, "seed": index, "max_tokens": 40, "ignore_eos": True} | kinds[index % 5])
        for index in range(len(PROMPTS))
    ]
    with LLM("demo", "bfloat16", tp_size=tp_size, max_running_req=24, custom_all_reduce=custom_all_reduce) as llm:
        assert llm._engine._tp.pushes == custom_all_reduce
        alone = [llm.generate(PROMPTS[index], params[index])[0] for index in range(5)]  # each kind in graphs of its own
        answers = llm.generate(PROMPTS, params)
        llm.check_idle()
    return [answer["token_ids"] for answer in (*alone, *answers)]


@over_gpus(2, 4)
def test_sharded_logits_are_sampled_as_gathered_ones(tp_size: int) -> None:
    """Without our own all-reduce every rank gathers them, and products norm their inputs, which rounds otherwise: a
    draw near the boundary of two tokens may fall on its other side.
    """
    divided, gathered = (
        in_new_process(sampled_tokens_of, tp_size, custom_all_reduce=custom) for custom in (True, False)
    )
    same = sum(a == b for a, b in zip(divided, gathered, strict=True))
    assert same >= len(divided) - 3


@over_gpus(2, 4)
def test_gpus_answer_as_one_does(tp_size: int) -> None:
    assert in_new_process(tokens_of, tp_size, "float32", "torch") == tokens_of(1, "float32", "torch")


@over_gpus(2, 4)
def test_gpus_answer_as_one_does_in_bfloat16_from_graphs(tp_size: int) -> None:
    """Answers may part where two tokens are nearly as likely, because sums are rounded in another order."""
    several, one = in_new_process(tokens_of, tp_size, "bfloat16", "auto"), tokens_of(1, "bfloat16", "auto")
    same = sum(a == b for a, b in zip(several, one, strict=True))
    assert same >= len(PROMPTS) * 3 // 4


def two_llms(tp_size: int) -> list[tuple[bool, list[list[int]]]]:
    """Return for each LLM, one after the other, whether it has our all-reduce, and its answers."""
    found = []
    for _ in range(2):
        with LLM("demo", "bfloat16", tp_size=tp_size, max_running_req=24) as llm:
            answers = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
            found.append((llm._engine._tp.pushes, [answer["token_ids"] for answer in answers]))
    return found


@over_gpus(2, 4)
def test_the_second_llm_of_a_process_has_our_all_reduce(tp_size: int) -> None:
    """Its other ranks are new processes, in which torch counts from 0; in rank 0's process it goes on counting."""
    (first_pushes, first), (second_pushes, second) = in_new_process(two_llms, tp_size)
    assert (first_pushes, second_pushes) == (True, True)
    assert sum(a == b for a, b in zip(first, second, strict=True)) >= len(PROMPTS) * 3 // 4


@pytest.mark.parametrize("way", WAYS)
@over_gpus(2, 4)
def test_a_program_that_closes_no_llm_ends(tp_size: int, way: str) -> None:
    """torch's group of NCCL alone would wait for ever at the end of the process."""
    answers = run_unclosed(tp_size, way)
    assert answers == [answers[0]] * (2 if way == "frees_it" else 1)

"""The offline headline and the latency of a decode step, of one model on this machine.

    python benchmark/offline.py --model FOLDER [--dummy] [--runs 3] [--latency 1,8,64] [--json FILE]

Output tokens per second count detokenizing. Milliseconds per step are (time of 257 new tokens - time of 1) / 256, for
prompts of 512 tokens, greedy, median of 3.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from minisgl import LLM, SamplingParams
from minisgl.benchmark.workload import offline_batch, random_prompts

NEW_TOKENS = 256


def generate(llm: LLM, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> float:
    """Seconds to answer all prompts in full."""
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count) for count in max_tokens]
    begin = time.perf_counter()
    answers = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    made = sum(len(answer["token_ids"]) for answer in answers)
    if made != sum(max_tokens):
        raise RuntimeError(f"{made} tokens came, {sum(max_tokens)} were asked for")
    return seconds


def measure_offline(llm: LLM, runs: int) -> list[float]:
    """Output tokens per second of each run."""
    rates = []
    for run in range(runs):
        batch = offline_batch(run)
        seconds = generate(llm, batch.prompts, batch.max_tokens, temperature=0.6)
        rates.append(batch.output_tokens / seconds)
        print(
            f"offline run {run}: {batch.output_tokens} tokens in {seconds:.2f} s, {rates[-1]:.0f} tok/s", flush=True
        )
    return rates


def measure_step(llm: LLM, rng: random.Random, batch_size: int) -> tuple[float, float]:
    """Milliseconds to the first token of all, and per step after it."""
    firsts, steps = [], []
    for _ in range(3):
        first = generate(llm, random_prompts(rng, batch_size, 512), [1] * batch_size, temperature=0.0)
        prompts = random_prompts(rng, batch_size, 512)
        whole = generate(llm, prompts, [NEW_TOKENS + 1] * batch_size, temperature=0.0)
        firsts.append(first * 1e3)
        steps.append((whole - first) / NEW_TOKENS * 1e3)
    return statistics.median(firsts), statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--runs", type=int, default=3, help="of the offline workload")
    parser.add_argument("--latency", default="1,8,64", help="batch sizes, comma-separated")
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--attn", default="auto")
    parser.add_argument("--graph", type=int, default=None, help="largest batch in a CUDA graph; 0: none")
    parser.add_argument("--disable-overlap", action="store_true")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()

    begin = time.perf_counter()
    llm = LLM(
        args.model,
        use_dummy_weight=args.dummy,
        page_size=args.page_size,
        attention_backend=args.attn,
        cuda_graph_max_bs=args.graph,
        overlap=not args.disable_overlap,
    )
    start = time.perf_counter() - begin
    print(f"start {start:.1f} s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in llm.phases.items())}")
    rng = random.Random(4242)
    generate(llm, random_prompts(rng, 8, 64), [16] * 8, temperature=0.6)
    generate(llm, random_prompts(rng, 64, 300), [8] * 64, temperature=0.6)

    result: dict[str, Any] = {"start_seconds": start, "phases": llm.phases}
    result["offline_tokens_per_second"] = measure_offline(llm, args.runs)
    for batch_size in filter(None, args.latency.split(",")):
        first, step = measure_step(llm, rng, int(batch_size))
        result[f"batch_{batch_size}"] = {"first_ms": first, "step_ms": step}
        print(f"batch {batch_size}: first {first:.2f} ms, {step:.3f} ms per step", flush=True)
    llm.close()
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

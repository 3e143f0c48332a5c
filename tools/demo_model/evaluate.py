"""Scores the demo model by skill on unseen cases: python -m demo_model.evaluate (with tools/ on PYTHONPATH).

The model answers greedily, either here through transformers (--model FOLDER) or behind any OpenAI-compatible
server (--base-url URL). Prints a table and, with --json FILE, writes the scores and what was answered wrong.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_model.case import Case, message_text
from demo_model.skills import SKILLS, make_case

Answerer = Callable[[Sequence[Case]], list[str]]

DEMO_FOLDER = Path(__file__).parents[2] / "python" / "minisgl" / "demo"


@dataclass
class Score:
    cases: int = 0
    right: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.right / self.cases if self.cases else 0.0


def score(cases: Sequence[Case], answerer: Answerer) -> dict[str, Score]:
    """Asks all cases and counts the right answers by skill."""
    scores: dict[str, Score] = {}
    for case, text in zip(cases, answerer(cases), strict=True):
        entry = scores.setdefault(case.skill, Score())
        entry.cases += 1
        if case.check(text):
            entry.right += 1
        else:
            asked = case.prompt if case.prompt is not None else case.messages[-1]["content"]
            entry.wrong.append({"asked": asked, "answered": text, "right": case.output})
    return scores


def transformers_answerer(folder: Path, device: str, dtype: str, batch_size: int) -> Answerer:
    """Answers by transformers' own generate, in batches of prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()

    def prompt(case: Case) -> str:
        if case.prompt is not None:
            return case.prompt
        tools = None if case.tools is None else list(case.tools)
        text = tokenizer.apply_chat_template(
            list(case.messages), tools=tools, add_generation_prompt=True, tokenize=False, **case.chat_template_kwargs
        )
        assert isinstance(text, str)
        return text

    @torch.inference_mode()
    def answer(cases: Sequence[Case]) -> list[str]:
        texts = [""] * len(cases)
        order = sorted(range(len(cases)), key=lambda index: cases[index].max_tokens)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            inputs = tokenizer([prompt(cases[i]) for i in chosen], padding=True, return_tensors="pt").to(device)
            longest = max(cases[i].max_tokens for i in chosen)
            output = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                do_sample=False,
                max_new_tokens=longest,
            )
            new = output[:, inputs.input_ids.shape[1] :]
            for i, text in zip(chosen, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                texts[i] = text
        return texts

    return answer


def server_answerer(base_url: str, model: str, concurrency: int) -> Answerer:
    """Answers by a server's /chat/completions and /completions."""

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{base_url.rstrip('/')}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            choice: dict[str, Any] = json.load(response)["choices"][0]
        return choice

    def ask(case: Case) -> str:
        body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": case.max_tokens}
        if case.prompt is not None:
            return str(post("completions", body | {"prompt": case.prompt})["text"])
        body["messages"] = list(case.messages)
        if case.tools:
            body["tools"] = list(case.tools)
        if case.chat_template_kwargs:
            body["chat_template_kwargs"] = case.chat_template_kwargs
        return message_text(post("chat/completions", body)["message"])

    def answer(cases: Sequence[Case]) -> list[str]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(ask, cases))

    return answer


def table(scores: dict[str, Score]) -> str:
    lines = [f"{'skill':<12} {'cases':>5} {'right':>5} {'share':>6}"]
    lines += [f"{skill:<12} {s.cases:>5} {s.right:>5} {s.share:>6.1%}" for skill, s in scores.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder to evaluate through transformers")
    parser.add_argument("--base-url", help="evaluate a server instead, for example http://localhost:1919/v1")
    parser.add_argument("--model-name", default="demo", help="the model's name in requests to the server")
    parser.add_argument("--skills", nargs="+", choices=list(SKILLS), default=list(SKILLS), help="skills to score")
    parser.add_argument("--cases", type=int, default=50, help="cases of each skill")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--context", type=int, default=1900, help="about the longest context, in tokens")
    parser.add_argument("--device", default="cpu", help="device on which transformers computes")
    parser.add_argument("--dtype", default="float32", help="type of weights and computation")
    parser.add_argument("--batch-size", type=int, default=8, help="cases that transformers answers at a time")
    parser.add_argument("--concurrency", type=int, default=8, help="requests to the server at once")
    parser.add_argument("--json", type=Path, help="file for the scores and the wrong answers")
    args = parser.parse_args()

    if args.base_url:
        answerer = server_answerer(args.base_url, args.model_name, args.concurrency)
    else:
        answerer = transformers_answerer(args.model, args.device, args.dtype, args.batch_size)
    numbers = range(args.first, args.first + args.cases)
    scores = score([make_case(skill, i, context=args.context) for skill in args.skills for i in numbers], answerer)
    print(table(scores))
    if args.json:
        report = {skill: {"cases": s.cases, "right": s.right, "wrong": s.wrong} for skill, s in scores.items()}
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

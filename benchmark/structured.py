"""The cost of structured output: output tokens per second with and without a JSON schema, by batch size.

Every answer has the same number of tokens. The schema is an array of more records than fit, so no answer can end
early, and ends of sequence are not allowed before; the free answers ignore them. Random weights choose among the
allowed tokens nearly at random, so the rows' grammars are in different states. Use a real vocabulary: the cost of a
bitmask depends on it.

    python benchmark/structured.py --shape 0.6b --tokenizer FOLDER
    python benchmark/structured.py --device cpu --batch-sizes 1,8 --new 64

The default sizes are for a GPU: on a CPU they take minutes with the demo model, and the second line seconds.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from measuring.arguments import (
    add_engine_arguments,
    add_output_arguments,
    engine_options,
    integers,
    make_parser,
    model_folder_of,
    output_of,
)
from measuring.engines import EngineOptions, MinisglEngine
from measuring.report import table
from measuring.workload import random_prompts
from minisgl.sampling_params import Grammar, SamplingParams

RECORD: dict[str, dict[str, Any]] = {
    "name": {"type": "string"},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "score": {"type": "number"},
    "level": {"enum": ["low", "medium", "high"]},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    "note": {"type": ["string", "null"]},
    "active": {"type": "boolean"},
}
PROMPT_IDS = 256  # every vocabulary has them


def records(*, limited: bool) -> dict[str, Any]:
    """Return a schema of records. `limited`: strings have a maxLength, so bitmasks take several times as long."""
    properties = dict(RECORD)
    if limited:
        properties["name"] = {"type": "string", "maxLength": 40}
        properties["tags"] = {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5}
    record = {"type": "object", "properties": properties, "required": list(RECORD), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 5000}


def measure(options: EngineOptions, args: Namespace) -> dict[str, Any]:
    """Measure tokens per second of each batch size, free and constrained, run by run."""
    rng = random.Random(0)
    free = SamplingParams(temperature=args.temperature, ignore_eos=True, max_tokens=args.new, seed=0)
    sampling = {
        "free": free,
        "json_schema": SamplingParams(
            temperature=args.temperature,
            max_tokens=args.new,
            seed=0,
            grammar=Grammar("json_schema", json.dumps(records(limited=args.limited))),
        ),
    }
    figures: dict[str, Any] = {"batch_sizes": {}}
    with closing(MinisglEngine(options)) as engine:
        figures["start"] = {name: round(seconds, 1) for name, seconds in engine.phases.items()}
        bar = tqdm(total=len(args.batch_sizes) * (args.runs + 1) * len(sampling), desc="Structured", unit="run")
        for size in args.batch_sizes:
            rates: dict[str, list[float]] = {name: [] for name in sampling}
            for run in range(args.runs + 1):
                for name, one in sampling.items():
                    prompts = random_prompts(rng, size, args.prompt, PROMPT_IDS)
                    begin = time.perf_counter()
                    answers = engine.llm.generate(prompts, one)
                    seconds = time.perf_counter() - begin
                    if any(len(answer["token_ids"]) != args.new for answer in answers):
                        raise RuntimeError(f"{name}: an answer ended early: {answers[0]['finish_reason']}")
                    bar.update()
                    if run > 0:  # the first warms up
                        rates[name].append(size * args.new / seconds)
            figures["batch_sizes"][size] = rates
        bar.close()
    return figures


def print_results(figures: dict[str, Any]) -> None:
    rows = []
    for size, rates in figures["batch_sizes"].items():
        free, constrained = (statistics.median(rates[name]) for name in ("free", "json_schema"))
        rows.append(
            [
                size,
                free,
                constrained,
                f"{constrained / free:.1%}",
                size / free * 1e3,
                size / constrained * 1e3,
            ]
        )
    print(table(["batch size", "free tok/s", "schema tok/s", "share", "free ms/token", "schema ms/token"], rows))


def with_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Give a shape's folder another tokenizer and its ends of sequence."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    special = json.loads((tokenizer / "generation_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    config |= {name: special.get(name) for name in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = make_parser(__doc__)
    add_engine_arguments(parser)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--batch-sizes",
        type=integers,
        default=(1, 8, 64),
        metavar="SIZES",
        help="numbers of answers at a time; on a CPU: 1,8",
    )
    work.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="length of each prompt")
    work.add_argument("--new", type=int, default=512, metavar="TOKENS", help="length of each answer; on a CPU: 64")
    work.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each kind of grammar, in turns")
    work.add_argument(
        "--limited", action="store_true", help="limit the length of the schema's strings, which takes longer"
    )
    work.add_argument("--temperature", type=float, default=0.6)
    work.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="folder of a tokenizer to use in place of the shape's"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    output = output_of(args)

    with model_folder_of(args) as folder:
        if args.tokenizer is not None:
            if args.shape is None:
                parser.error("--tokenizer is for --shape")
            with_tokenizer(folder, args.tokenizer)
        figures = measure(engine_options(args, folder, args.prompt + args.new), args)
    print_results(figures)
    output.save("structured", args, figures)


if __name__ == "__main__":
    main()

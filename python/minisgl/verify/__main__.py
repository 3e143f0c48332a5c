"""Command line of `minisgl verify`, also `python -m minisgl.verify`.

Both engines run one after the other, transformers first, so that memory for one of them is enough. The exit code is 0
when every difference is within the dtype's rounding (`compare` says what that is), 1 when it is not, 2 when the model
cannot be compared here.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from minisgl.config import ConfigError, EngineConfig, SchedulerConfig
from minisgl.config.settings import add_flags, read_flags
from minisgl.engine.device import resolve_device, resolve_dtype
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.download import ended_by_signals
from minisgl.models.hub import model_folder
from minisgl.models.load_config import load_model_config
from minisgl.progress import progress_bar
from minisgl.sampling_params import InvalidRequest
from minisgl.tokenizer.text import TextTokenizer
from minisgl.verify.compare import tolerance
from minisgl.verify.findings import Detokenize, judge, print_report
from minisgl.verify.oracle import run_transformers
from minisgl.verify.ours import run_engine
from minisgl.verify.prompt_texts import make_prompts

ENGINE_FLAGS = "dtype device attention page_size num_pages memory_ratio max_running_requests max_seq_len".split()
SCHEDULER_FLAGS = "cache max_prefill_tokens overlap".split()
# Fewer running requests than prompts, so that some wait; small chunks, so that prompts are cut.
ENGINE_DEFAULTS = {"dtype": "float32", "attention": "torch", "max_running_requests": 8}
# No step depends on the time.
SCHEDULER_DEFAULTS = {"max_prefill_tokens": 96, "target_tbt": 0.0}
GRAPH_MAX_BS = 8


def main(argv: Sequence[str]) -> int:
    """Run the comparison and print what it found."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = _parse(argv)
    try:
        return _verify(args)
    except (ConfigError, InvalidRequest) as error:
        print(f"minisgl verify: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _verify(args: argparse.Namespace) -> int:
    given = {"cuda_graph_max_bs": GRAPH_MAX_BS, **ENGINE_DEFAULTS, **read_flags(args, EngineConfig)}
    engine = EngineConfig(model_path="", **given)
    scheduling = SchedulerConfig(**{**SCHEDULER_DEFAULTS, **read_flags(args, SchedulerConfig)})
    engine.validate()
    scheduling.validate()
    with ended_by_signals():
        folder = model_folder(args.model, weights=True)
        reference = model_folder(args.reference, weights=True) if args.reference else folder
    model = load_model_config(folder, runner="generate", implementation=engine.model_impl)
    engine = msgspec.structs.replace(engine, model_path=str(folder))
    device, dtype = resolve_device(engine), resolve_dtype(engine, model.dtype)
    tokenizer = _tokenizer(folder)
    prompts = make_prompts(
        None if tokenizer is None else lambda text: tokenizer.encode(text).tolist(),
        vocab_size=model.vocab_size,
        max_len=_max_prompt(engine, model, args.new_tokens),
    )
    with (
        tempfile.TemporaryDirectory(prefix="minisgl-verify-", dir=args.scratch) as scratch,
        progress_bar("verify", len(prompts) + 3) as bar,
    ):
        bar.set_description("transformers")
        answers = run_transformers(
            reference,
            prompts,
            new_tokens=args.new_tokens,
            dtype=dtype,
            device=device,
            scratch=Path(scratch),
            progress=bar.update,
        )
        if len(answers.expected[0].logits[0]) != model.vocab_size:
            raise ConfigError(f"{reference} has another vocabulary than {folder}")
        bar.set_description("ours")
        ours = run_engine(engine, scheduling, model, answers, progress=bar.update)
        bar.close()
        limits = tolerance(
            str(dtype).removeprefix("torch."),
            model.num_layers,
            args.tolerance,
            experts_per_token=model.experts_per_token,
        )
        report = judge(answers, ours, limits, has_experts=model.experts_per_token > 0)
        if args.json:
            about = {"model": args.model, "device": str(device), "dtype": str(dtype).removeprefix("torch.")}
            print(json.dumps({**about, **report.to_json()}, indent=2, ensure_ascii=False))
        else:
            decode: Detokenize | None = None if tokenizer is None else lambda ids: tokenizer.decode(ids, False)
            print_report(report, answers, decode)
    return 0 if report.ok else 1


def _tokenizer(folder: Path) -> TextTokenizer | None:
    """Return the model's tokenizer; None if none can be read, and the prompts are random."""
    try:
        return TextTokenizer.from_folder(folder)
    except ConfigError as error:
        print(f"minisgl verify: random token ids are the prompts: {error}", file=sys.stderr)
        return None


def _max_prompt(config: EngineConfig, model: ModelConfig, new_tokens: int) -> int:
    room = min(config.max_seq_len or model.max_position_embeddings, model.max_position_embeddings) - new_tokens
    if config.num_pages is not None:
        room = min(room, config.num_pages * config.page_size - new_tokens)
    if room < 1:
        raise ConfigError(f"--new-tokens {new_tokens} leaves no room for a prompt")
    return room


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="minisgl verify",
        description="Compare logits and greedy tokens of a model with Hugging Face transformers on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or hub id of the model; demo: the built-in one")
    parser.add_argument(
        "--reference",
        default=None,
        metavar="MODEL",
        help="folder or hub id that transformers loads; none: the same model",
    )
    add_flags(parser, EngineConfig, only=ENGINE_FLAGS, defaults=ENGINE_DEFAULTS)
    add_flags(parser, SchedulerConfig, only=SCHEDULER_FLAGS, defaults=SCHEDULER_DEFAULTS)
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=24,
        metavar="N",
        help="tokens to generate for each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="factor of the largest allowed differences (default: %(default)s)",
    )
    parser.add_argument(
        "--scratch",
        default=None,
        metavar="DIR",
        help="folder for the logits of transformers; none: the folder that TMPDIR names",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    if args.new_tokens < 1:
        parser.error(f"--new-tokens must be at least 1, not {args.new_tokens}")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

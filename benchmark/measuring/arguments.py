"""Parts that the scripts share: flags, the model's folder, one process an engine, output."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from measuring.engines import ENGINES, EngineOptions
from measuring.report import write_json
from measuring.shapes import SHAPES, make_shape, read_context
from minisgl.config.engine import DEFAULT_PAGE_SIZE, Device, KVCacheDtype, ModelImplementation, QuantizationMethod
from minisgl.config.scheduler import BatchPolicyName, SchedulePolicy

T = TypeVar("T")
PEERS_WITH_OPTIONS = ("vllm", "sglang")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the default after each flag that has one, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ((), []):
            return action.help
        if isinstance(action.default, tuple | list):  # as they are written: with commas, or several words
            written = (" " if action.nargs else ",").join(map(str, action.default))
            return f"{action.help} (default: {written})"
        return super()._get_help_string(action)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter, allow_abbrev=False)


def parse_with_command(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of this script, and the command after `--`, empty if there is none."""
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:at]), argv[at + 1 :]


def integers(text: str) -> tuple[int, ...]:
    """Parse positive numbers, separated by commas."""
    return tuple(_positive(int(part)) for part in text.split(",") if part)


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers of at least 0, separated by commas."""
    values = tuple(float(part) for part in text.split(",") if part)
    if not values or min(values) < 0:
        raise argparse.ArgumentTypeError(f"numbers of at least 0, separated by commas, not {text!r}")
    return values


def _positive(value: int) -> int:
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _engine_path(text: str) -> tuple[str, list[str]]:
    name, _, folders = text.partition("=")
    (name,) = _engines(name)
    if missing := [folder for folder in folders.split(os.pathsep) if not Path(folder).is_dir()]:
        raise argparse.ArgumentTypeError(f"no folder: {', '.join(missing)}; write NAME=FOLDER or NAME=FOLDER:FOLDER")
    return name, [str(Path(folder).resolve()) for folder in folders.split(os.pathsep)]


def _engine_option(text: str) -> tuple[str, str, Any]:
    name, _, option = text.partition(":")
    (name,) = _engines(name)
    key, equals, value = option.partition("=")
    if name not in PEERS_WITH_OPTIONS or not (key and equals):
        raise argparse.ArgumentTypeError(f"{' or '.join(PEERS_WITH_OPTIONS)}:OPTION=VALUE, not {text!r}")
    try:
        return name, key, json.loads(value)
    except ValueError:
        return name, key, value


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(ENGINES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    return names


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model is loaded, and how."""
    group = parser.add_argument_group("model and engine")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--model", default="demo", help="folder or hub id of the model; demo: the built-in one")
    which.add_argument(
        "--shape",
        choices=SHAPES,
        help="model of this shape (Qwen3's unless the name says otherwise) with random weights, made by the script",
    )
    group.add_argument("--dummy", action="store_true", help="load random weights, as --shape does")
    group.add_argument(
        "--dtype",
        default="auto",
        help="type of weights and computation: auto, bfloat16, float16 or float32; auto: the checkpoint's",
    )
    group.add_argument(
        "--device", default="auto", choices=get_args(Device), help="device on which minisgl and transformers compute"
    )
    group.add_argument("--max-running", type=int, default=256, metavar="N", help="sequences that run at the same time")
    group.add_argument(
        "--memory-ratio", type=float, default=0.9, help="share of the device's memory that an engine may use"
    )
    group.add_argument("--tp", type=int, default=1, metavar="N", help="devices among which a model is divided")
    group.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="minisgl: each device holds some experts whole, not a part of every one",
    )
    group.add_argument(
        "--disable-custom-all-reduce", action="store_true", help="minisgl: use NCCL for every all-reduce"
    )
    group.add_argument(
        "--model-impl",
        default="auto",
        choices=get_args(ModelImplementation),
        help="minisgl: implementation of the model; transformers: the modules of transformers",
    )
    group.add_argument(
        "--page-size",
        type=int,
        default=DEFAULT_PAGE_SIZE,
        metavar="TOKENS",
        help="minisgl: tokens per page of the KV cache",
    )
    group.add_argument(
        "--num-pages", type=int, metavar="PAGES", help="minisgl: pages in the KV cache; none: as many as memory allows"
    )
    group.add_argument(
        "--quantization",
        default="auto",
        choices=get_args(QuantizationMethod),
        help="minisgl: format of matrices; auto: the checkpoint's; others: rounded to it as they are loaded",
    )
    group.add_argument(
        "--fp8-activations", action="store_true", help="minisgl: round activations to FP8, too, if the format does"
    )
    group.add_argument("--attn", default="auto", metavar="NAME", help="minisgl: attention backend")
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=get_args(KVCacheDtype),
        help="minisgl: type of the stored K and V; auto: the model's dtype",
    )
    group.add_argument(
        "--graph",
        type=int,
        metavar="ROWS",
        help="minisgl: largest decode batch in a CUDA graph; 0: no graphs; none: --max-running",
    )
    group.add_argument(
        "--disable-overlap", action="store_true", help="minisgl: read each step's tokens before launching the next step"
    )
    group.add_argument(
        "--batch-policy",
        default="prefill-first",
        choices=get_args(BatchPolicyName),
        help="minisgl: rows of a step; mixed: decodes with chunks of prompts; prefill-first: prompts before decodes",
    )
    group.add_argument(
        "--schedule-policy",
        default="fcfs",
        choices=get_args(SchedulePolicy),
        help="minisgl: order in which waiting prompts enter",
    )
    group.add_argument(
        "--max-prefill-length",
        type=int,
        default=8192,
        metavar="TOKENS",
        help="minisgl: prompt tokens computed in one step",
    )


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which engines are compared."""
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--engine",
        type=_engines,
        default=("minisgl",),
        metavar="NAMES",
        help=f"engines to measure, one after the other, with commas: some of {','.join(ENGINES)}",
    )
    group.add_argument(
        "--engine-path",
        type=_engine_path,
        action="append",
        default=[],
        metavar="NAME=FOLDERS",
        help="folders in which an engine is installed apart from the others; may be repeated",
    )
    group.add_argument(
        "--engine-option",
        type=_engine_option,
        action="append",
        default=[],
        metavar="NAME:OPTION=VALUE",
        help="option of vLLM's LLM or SGLang's Engine, such as sglang:attention_backend=triton; may be repeated",
    )
    group.add_argument(
        "--static-batch",
        type=integers,
        default=(8, 32),
        metavar="SIZES",
        help="transformers: batch sizes to try, of which the fastest is measured",
    )


def check_gpus(count: int = 1) -> None:
    """SystemExit if torch finds fewer GPUs."""
    import torch  # not needed by the scripts that only send requests

    if (found := torch.cuda.device_count()) < count:
        wanted = "a GPU" if count == 1 else f"{count} GPUs"
        raise SystemExit(f"this measures {wanted}, and torch finds {found or 'none'}")


@contextmanager
def model_folder_of(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of --model or --shape; a shape's lasts as long as the block."""
    if args.shape is None:
        from minisgl.models.hub import model_folder  # knows the hub

        yield model_folder(args.model, weights=not args.dummy)
        return
    with tempfile.TemporaryDirectory(prefix="minisgl-shape-") as folder:
        yield make_shape(args.shape, Path(folder))


def engine_options(args: argparse.Namespace, folder: Path, longest: int, rows: int = 1) -> EngineOptions:
    """Return how to load the model for sequences of up to `longest` tokens, `rows` at once. SystemExit if it cannot."""
    if rows > args.max_running:
        raise SystemExit(f"{rows} sequences at once are more than the {args.max_running} of --max-running")
    context = read_context(folder)
    if longest > context:
        raise SystemExit(f"sequences of {longest} tokens do not fit into the model's context of {context}")
    return EngineOptions(
        model=str(folder),
        dummy=args.dummy or args.shape is not None,
        dtype=args.dtype,
        device=args.device,
        max_seq_len=min(context, max(longest, 4096)),
        max_running_requests=args.max_running,
        memory_ratio=args.memory_ratio,
        tp_size=args.tp,
        expert_parallel=args.enable_expert_parallel,
        custom_all_reduce=not args.disable_custom_all_reduce,
        model_impl=args.model_impl,
        page_size=args.page_size,
        num_pages=args.num_pages,
        quantization=args.quantization,
        fp8_activations=args.fp8_activations,
        attention=args.attn,
        kv_cache_dtype=args.kv_cache_dtype,
        graph_max_bs=args.graph,
        overlap=not args.disable_overlap,
        batch_policy=args.batch_policy,
        schedule_policy=args.schedule_policy,
        max_prefill_tokens=args.max_prefill_length,
        static_batches=vars(args).get("static_batch", ()),  # given only where engines are compared
    )


def run_each_engine(
    args: argparse.Namespace,
    measure: Callable[[str, EngineOptions, T], dict[str, Any]],
    options: EngineOptions,
    sizes: T,
    save: Callable[[dict[str, dict[str, Any]]], None],
) -> dict[str, dict[str, Any]]:
    """Return results by engine: one alone runs here; several run in a fresh process each, undisturbed.

    `save` gets all results that there are after each engine. One of several that fails tells why, and has none.
    """
    names: Sequence[str] = args.engine
    paths: dict[str, list[str]] = dict(args.engine_path)
    results: dict[str, dict[str, Any]] = {}
    if len(names) == 1 and not paths and not args.engine_option:
        results[names[0]] = measure(names[0], options, sizes)
        save(results)
        return results
    spawn = multiprocessing.get_context("spawn")
    for name in names:
        folders = paths.get(name, [])
        more = {key: value for peer, key, value in args.engine_option if peer == name}
        with ProcessPoolExecutor(
            max_workers=1, mp_context=spawn, initializer=_import_from, initargs=(folders,)
        ) as pool:
            try:
                results[name] = pool.submit(measure, name, replace(options, more=more), sizes).result()
            except Exception:
                if name == names[-1] and not results:
                    raise
                traceback.print_exc()
        save(results)
    return results


def check_engines(args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """SystemExit if some of the engines that were asked for have no results."""
    if missing := [name for name in args.engine if name not in results]:
        raise SystemExit(f"no figures of {', '.join(missing)}: see above")


def _import_from(folders: list[str]) -> None:
    """Let imports look into these folders first, in this process and those that it starts."""
    sys.path[:0] = folders
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True, slots=True)
class Output:
    """Files that results go to besides stdout."""

    json: Path | None
    plot: Path | None

    def save(self, tool: str, args: argparse.Namespace, results: Any) -> None:
        """Write the JSON file, if one is asked for."""
        if self.json is not None:
            arguments = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
            write_json(self.json, tool, arguments, results)


def add_output_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags that say where results go; return their group."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="file for the figures, the arguments and the machine")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="file for a plot of the figures; needs matplotlib")
    return group


def output_of(args: argparse.Namespace) -> Output:
    """Return where results go; checked before anything is measured."""
    if args.plot is not None:
        from measuring.plot import check_plotting

        check_plotting()
    return Output(args.json, args.plot)

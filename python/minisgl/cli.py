"""The command line: flags -> ServerConfig. Names and aliases of Mini-SGLang's command line are understood."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from minisgl import __version__
from minisgl.config import (
    BatchPolicyName,
    CacheType,
    ConfigError,
    Device,
    Dtype,
    EngineConfig,
    HttpConfig,
    KVCacheDtype,
    LoadFormat,
    LogprobsMode,
    SchedulePolicy,
    SchedulerConfig,
    ServerConfig,
)
from minisgl.models.demo import DEMO_MODEL
from minisgl.models.hub import model_folder
from minisgl.parsers.reasoning import REASONING_FORMATS
from minisgl.parsers.select import TOOL_CALL_PARSERS, known_reasoning_parser, known_tool_call_parser

logger = logging.getLogger(__name__)

# What flags that are not given stand for. The model's folder and name do not come from here.
_DEFAULT = ServerConfig(engine=EngineConfig(model_path=""), model_name="")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m minisgl",
        description="Serve a language model behind an OpenAI-compatible API.",
        epilog="python -m minisgl verify MODEL compares a model with transformers on this machine; "
        "python -m minisgl doctor tells what works here.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_model_flags(parser.add_argument_group("model"))
    _add_server_flags(parser.add_argument_group("server"))
    _add_http_flags(parser.add_argument_group("http"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_scheduler_flags(parser.add_argument_group("scheduler"))
    return parser


def _add_model_flags(model: argparse._ArgumentGroup) -> None:
    default = _DEFAULT.engine
    model.add_argument(
        "--model", "--model-path", default=DEMO_MODEL, help="folder or hub id of the model; demo: the built-in one"
    )
    model.add_argument("--dtype", default=default.dtype, choices=get_args(Dtype), help="auto: the checkpoint's")
    model.add_argument(
        "--load-format", default=default.load_format, choices=get_args(LoadFormat), help="dummy: random weights"
    )
    model.add_argument("--dummy-weight", action="store_true", help="the same as --load-format dummy")
    model.add_argument(
        "--served-model-name",
        nargs="+",
        default=None,
        metavar="NAME",
        help="what clients call the model; the first name is in the answers; none: the hub id, or the folder",
    )
    model.add_argument("--model-source", default="huggingface", help="only huggingface for now")
    model.add_argument(
        "--max-seq-len-override",
        type=int,
        default=default.max_seq_len,
        metavar="TOKENS",
        help="context length; none: the model's",
    )


def _add_server_flags(server: argparse._ArgumentGroup) -> None:
    server.add_argument("--host", default=_DEFAULT.host, help="address to listen on")
    server.add_argument("--port", type=int, default=_DEFAULT.port, help="TCP port to listen on; 0: any free one")
    server.add_argument(
        "--num-tokenizer",
        "--tokenizer-count",
        type=int,
        default=_DEFAULT.num_tokenizers,
        metavar="N",
        help="tokenizer processes",
    )
    server.add_argument(
        "--tool-call-parser",
        default=_DEFAULT.tool_call_parser,
        metavar="NAME",
        help=f"form of the model's tool calls: {', '.join(TOOL_CALL_PARSERS)} or none; auto: as its template shows",
    )
    server.add_argument(
        "--reasoning-parser",
        default=_DEFAULT.reasoning_parser,
        metavar="NAME",
        help=f"form of the model's thoughts: {', '.join(REASONING_FORMATS)} or none; auto: as its template shows",
    )
    server.add_argument(
        "--shell", "--shell-mode", action="store_true", help="chat in the terminal; the server ends with it"
    )


def _add_http_flags(http: argparse._ArgumentGroup) -> None:
    default = _DEFAULT.http
    http.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=list(default.api_keys),
        metavar="KEY",
        help="clients must send one of these as bearer token; better in MINISGL_API_KEY or a file: others see flags",
    )
    http.add_argument("--api-key-file", default=None, metavar="FILE", help="more keys, one a line")
    http.add_argument(
        "--allowed-origins",
        nargs="+",
        default=list(default.allowed_origins),
        metavar="ORIGIN",
        help="web pages that may call (CORS); * for all",
    )
    http.add_argument(
        "--allowed-methods",
        nargs="+",
        default=list(default.allowed_methods),
        metavar="METHOD",
        help="that such pages may use",
    )
    http.add_argument(
        "--allowed-headers",
        nargs="+",
        default=list(default.allowed_headers),
        metavar="HEADER",
        help="that such pages may send",
    )
    http.add_argument("--allow-credentials", action="store_true", help="such pages may send cookies")
    http.add_argument(
        "--root-path",
        default=default.root_path,
        metavar="PATH",
        help="that a reverse proxy puts before every route",
    )
    http.add_argument("--ssl-keyfile", default=default.ssl_keyfile, metavar="FILE", help="private key, for https")
    http.add_argument("--ssl-certfile", default=default.ssl_certfile, metavar="FILE", help="certificate, for https")
    http.add_argument(
        "--max-body-bytes", type=int, default=default.max_body_bytes, metavar="BYTES", help="of one request"
    )
    http.add_argument(
        "--max-queued-requests",
        type=int,
        default=default.max_queued_requests,
        metavar="N",
        help="sequences (each choice is one) running or waiting; further requests get 503",
    )
    http.add_argument(
        "--max-choices", type=int, default=default.max_choices, metavar="N", help="of a prompt: n, best_of"
    )
    http.add_argument(
        "--max-stop-strings", type=int, default=default.max_stop_strings, metavar="N", help="of a request"
    )
    http.add_argument(
        "--max-logprobs",
        type=int,
        default=default.max_logprobs,
        metavar="N",
        help="alternatives per token that a request may ask for",
    )
    http.add_argument(
        "--receive-timeout",
        type=float,
        default=default.receive_timeout,
        metavar="SECONDS",
        help="for a request to arrive whole",
    )
    http.add_argument(
        "--send-timeout",
        type=float,
        default=default.send_timeout,
        metavar="SECONDS",
        help="after which a client that accepts no data is disconnected",
    )
    http.add_argument(
        "--health-timeout",
        type=float,
        default=default.health_timeout,
        metavar="SECONDS",
        help="without a heartbeat through all processes after which /health fails",
    )


def _add_engine_flags(engine: argparse._ArgumentGroup) -> None:
    default = _DEFAULT.engine
    engine.add_argument("--device", default=default.device, choices=get_args(Device), help="auto: cuda if there is one")
    engine.add_argument(
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        type=int,
        default=default.tp_size,
        metavar="N",
        help="GPUs, or processes on the CPU, that hold the model together",
    )
    engine.add_argument(
        "--attn",
        "--attention-backend",
        default=default.attention,
        metavar="NAME",
        help="attention: auto, fa, fi or torch, or two with a comma: for prefill, for decode (there also fused)",
    )
    engine.add_argument("--page-size", type=int, default=default.page_size, metavar="TOKENS", help="of the KV cache")
    engine.add_argument(
        "--num-pages",
        type=int,
        default=default.num_pages,
        metavar="PAGES",
        help="in the KV cache; none: as memory allows",
    )
    engine.add_argument(
        "--memory-ratio",
        type=float,
        default=default.memory_ratio,
        metavar="RATIO",
        help="of the GPU's memory; on the CPU, of the free memory for the KV cache, at most 8 GiB",
    )
    engine.add_argument(
        "--max-running-requests",
        type=int,
        default=default.max_running_requests,
        metavar="N",
        help="requests that run at the same time",
    )
    engine.add_argument(
        "--cuda-graph-max-bs",
        "--graph",
        type=int,
        default=default.cuda_graph_max_bs,
        metavar="ROWS",
        help="largest decode batch in a CUDA graph; 0: no graphs; none: --max-running-requests",
    )
    engine.add_argument(
        "--logprobs-mode",
        default=default.logprobs_mode,
        choices=get_args(LogprobsMode),
        help="log-probabilities of the model's logits, or after penalties, biases, masks and temperature",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        default=default.kv_cache_dtype,
        choices=get_args(KVCacheDtype),
        help="what K and V are stored in; auto: the model's dtype; fp8_e4m3: 8 bits, of which twice as many fit",
    )
    engine.add_argument("--disable-pynccl", action="store_true", help="accepted for Mini-SGLang; has no effect")
    engine.add_argument("--moe-backend", default=None, metavar="NAME", help="of experts (there is no choice yet)")


def _add_scheduler_flags(scheduler: argparse._ArgumentGroup) -> None:
    default = _DEFAULT.scheduler
    scheduler.add_argument(
        "--cache",
        "--cache-type",
        default=default.cache,
        choices=get_args(CacheType),
        help="radix: reuse shared prefixes",
    )
    scheduler.add_argument(
        "--max-prefill-length",
        "--max-extend-length",
        type=int,
        default=default.max_prefill_tokens,
        metavar="TOKENS",
        help="prompt tokens computed in one step; longer prompts are cut into chunks",
    )
    scheduler.add_argument(
        "--batch-policy",
        default=default.batch_policy,
        choices=get_args(BatchPolicyName),
        help="prefill-first: prompts before decodes; mixed: every decode in every step, prompts in what is left of "
        "--max-prefill-length",
    )
    scheduler.add_argument(
        "--schedule-policy",
        default=default.schedule_policy,
        choices=get_args(SchedulePolicy),
        help="who enters first: fcfs: who came first; lpm: longest cached prefix",
    )
    scheduler.add_argument(
        "--disable-overlap", action="store_true", help="read each step's tokens before launching the next step"
    )


def _http_config(args: argparse.Namespace) -> HttpConfig:
    return HttpConfig(
        api_keys=tuple(api_keys(args.api_key, args.api_key_file, os.environ.get("MINISGL_API_KEY", ""))),
        allowed_origins=tuple(args.allowed_origins),
        allowed_methods=tuple(args.allowed_methods),
        allowed_headers=tuple(args.allowed_headers),
        allow_credentials=args.allow_credentials,
        root_path=args.root_path,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        max_body_bytes=args.max_body_bytes,
        max_queued_requests=args.max_queued_requests,
        max_choices=args.max_choices,
        max_stop_strings=args.max_stop_strings,
        max_logprobs=args.max_logprobs,
        receive_timeout=args.receive_timeout,
        send_timeout=args.send_timeout,
        health_timeout=args.health_timeout,
    )


def api_keys(flags: Sequence[str], file: str | None, environment: str) -> list[str]:
    """The keys of the flag, the file (one a line) and the environment (separated by commas)."""
    keys = [*flags, *filter(None, map(str.strip, environment.split(",")))]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"--api-key-file {file} has no key")  # and must not mean: open to all
        keys += found
    return keys


def parse_args(argv: Sequence[str]) -> tuple[ServerConfig, Callable[[], Path]]:
    """The configuration for these arguments, still without `model_path`, and what finds (or downloads) that folder.

    Both raise ConfigError.
    """
    args = make_parser().parse_args(argv)
    _refuse_later_parts(args)
    if args.disable_pynccl:
        logger.info("--disable-pynccl has no effect")
    load_format: LoadFormat = "dummy" if args.dummy_weight else args.load_format
    # Clients that read a tokenizer from a folder often use the folder as the model's name, too.
    names: list[str] = args.served_model_name or list(dict.fromkeys([model_name(args.model), args.model]))
    config = ServerConfig(
        engine=EngineConfig(
            model_path="",
            device=args.device,
            dtype=args.dtype,
            load_format=load_format,
            attention=args.attn,
            kv_cache_dtype=args.kv_cache_dtype,
            page_size=args.page_size,
            num_pages=args.num_pages,
            memory_ratio=args.memory_ratio,
            max_running_requests=args.max_running_requests,
            max_seq_len=args.max_seq_len_override,
            cuda_graph_max_bs=args.cuda_graph_max_bs,
            logprobs_mode=args.logprobs_mode,
            tp_size=args.tp,
        ),
        scheduler=SchedulerConfig(
            cache=args.cache,
            max_prefill_tokens=args.max_prefill_length,
            batch_policy=args.batch_policy,
            schedule_policy=args.schedule_policy,
            overlap=not args.disable_overlap,
        ),
        http=_http_config(args),
        model_name=names[0],
        model_aliases=tuple(names[1:]),
        host=args.host,
        port=args.port,
        num_tokenizers=args.num_tokenizer,
        tool_call_parser=known_tool_call_parser(args.tool_call_parser),
        reasoning_parser=known_reasoning_parser(args.reasoning_parser),
        shell=args.shell,
    )
    config.validate()
    return config, lambda: model_folder(args.model, weights=load_format != "dummy")


def model_name(model: str) -> str:
    """What clients call it: a hub id as it is, a folder by its last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _refuse_later_parts(args: argparse.Namespace) -> None:
    later = {
        f"--moe-backend {args.moe_backend}: a choice of how experts are computed": args.moe_backend is not None,
        f"--model-source {args.model_source}: another source than huggingface": args.model_source != "huggingface",
    }
    for what, asked in later.items():
        if asked:
            raise ConfigError(f"{what} is not there yet")

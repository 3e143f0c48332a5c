"""The command line: makes a ServerConfig of flags.

Command lines of Mini-SGLang run unchanged. Flags of vLLM and SGLang with the same meaning as one of ours are aliases,
which the settings declare (`config`); for flags with another meaning, an error says what to use instead.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn

import msgspec

from minisgl import __version__
from minisgl.config import ConfigError, EngineConfig, HttpConfig, SchedulerConfig, ServerConfig, SourceConfig
from minisgl.config.settings import add_flags, read_flags
from minisgl.models.hub import ModelFolders, find_model

logger = logging.getLogger(__name__)


def _by_flag(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table by flag, from one whose keys are several flags each."""
    return {flag: text for flags, text in table.items() for flag in flags.split()}


# Flags of vLLM, SGLang and Mini-SGLang for behaviour that is always on here.
NO_EFFECT = _by_flag(
    {
        "--disable-pynccl": "NCCL is used through torch",
        "--trust-remote-code": "code that comes with a model is never run: a model that needs it is refused by name",
        "--enable-reasoning": "reasoning is found wherever the chat template shows its form",
        "--enable-auto-tool-choice": "tool calls are found wherever the chat template shows their form",
        "--enable-chunked-prefill": "prompts longer than --max-prefill-length are always cut",
        "--async-scheduling": "overlap is on unless --disable-overlap says otherwise",
        "--enable-metrics": "/metrics is always there",
        "--enable-server-load-tracking": "/load is always there",
        "--enable-tokenizer-info-endpoint": "/tokenizer_info is always there",
        "--enable-request-id-headers": "every answer has an x-request-id",
        "--enable-priority-scheduling": "requests' priorities are always obeyed",
        "--enable-nan-detection": "logits that are not finite are always found",
        "--language-model-only": "there is nothing but the language model",
        "--enable-prompt-tokens-details --enable-cache-report": "usage always counts cached tokens",
        "--disable-log-requests --no-enable-log-requests": "texts of requests are never logged",
        "--disable-log-stats": "statistics are at /metrics and not logged",
    }
)
# Flags of vLLM and SGLang that have another form here, or none, with what to do instead.
NO_SUCH_FLAG = _by_flag(
    {
        "--max-total-tokens": "give --num-pages: the KV cache has as many pages of --page-size tokens",
        "--max-mamba-cache-size": "give --max-running-requests and, for states after prefixes, --state-snapshots",
        "--kv-cache-memory-bytes": "give --num-pages or --memory-ratio",
        "--max-prefill-tokens": "a step's budget is --max-prefill-length, to which longer prompts are cut",
        "--no-enable-chunked-prefill": "prompts longer than --max-prefill-length are always cut",
        "--prefill-attention-backend --decode-attention-backend": "give --attn PREFILL,DECODE",
        "--cuda-graph-bs --cuda-graph-sizes": "give --cuda-graph-max-bs: the sizes up to it follow",
        "--compilation-config --optimization-level": "give --cuda-graph-max-bs: no other compilation can be configured",
        "--enable-torch-compile": "there is no torch.compile here: kernels are compiled at the first start",
        "--scheduling-policy": "give --schedule-policy; requests' priorities are always obeyed",
        "--pipeline-parallel-size -pp --pp-size": "--tp is the only way to divide a model among GPUs",
        "--data-parallel-size -dp --dp-size --dp": "start a server for each replica, behind a proxy",
        "--enable-dp-attention": "--tp divides attention by its heads",
        "--kv-transfer-config --disaggregation-mode": "one server does both, prefill and decode",
        "--nnodes --node-rank --dist-init-addr --master-addr": "a server runs on one host",
        "--base-gpu-id": "choose GPUs with CUDA_VISIBLE_DEVICES",
        "--distributed-executor-backend": "each rank is a process of one host",
        "--enable-lora --lora-modules --lora-paths": "LoRA adapters are not supported: merge them into the weights",
        "--speculative-config --speculative-algorithm": "there is no speculative decoding",
        "--swap-space": "a request that loses its pages computes them again; nothing is swapped",
        "--torchao-config": "give --quantization fp8, int8 or int4",
        "--kv-offloading-size --enable-hierarchical-cache": "the KV cache is on the device alone",
        "--cpu-offload-gb": "weights stay on the device: divide them among GPUs with --tp",
        "--seed --random-seed": "send seed with a request: random numbers depend only on it and on a token's position",
        "--enable-deterministic-inference": "rounding depends on the batch; send seed for the same random numbers",
        "--tokenizer-revision": "give --tokenizer as a folder with that revision",
        "--config-format": "a model is read from its config.json and safetensors",
        "--tokenizer-mode": "the tokenizer is always the fast one (tokenizer.json)",
        "--hf-overrides --json-model-override-args --rope-scaling": "change config.json in a folder of your own",
        "--task": "give --runner pooling, and --convert embed or classify where the model's folder does not say it",
        "--grammar-backend --guided-decoding-backend --structured-outputs-config": "llguidance compiles all grammars",
        "--chat-template-content-format": "messages get the form that the chat template expects",
        "--default-chat-template-kwargs": "give --chat-template a file with them, or send chat_template_kwargs",
        "--override-generation-config --preferred-sampling-params": "give --generation-config a folder with the file",
        "--limit-mm-per-prompt --enable-multimodal": "only text is served",
        "--stream-interval": "the tokens of each step are sent at once",
        "--download-dir": "set HF_HUB_CACHE",
        "--hf-token": "set HF_TOKEN",
        "--config": "there is no file of flags: give them on the command line",
        "--api-server-count": "one process answers HTTP; --num-tokenizer starts more tokenizers",
        "--log-requests --enable-log-requests": "texts are never logged; --access-log logs one line a request",
    }
)
# Values, separated by spaces, with which these flags ask for what is so in any case: scripts often name defaults.
NEUTRAL_VALUES = _by_flag(
    {
        "--pipeline-parallel-size -pp --pp-size --data-parallel-size -dp --dp-size --dp": "1",
        "--nnodes --api-server-count --stream-interval": "1",
        "--node-rank --base-gpu-id --cpu-offload-gb --kv-offloading-size --swap-space": "0",
        "--distributed-executor-backend": "mp uni",
        "--tokenizer-mode --chat-template-content-format": "auto",
        "--config-format": "auto hf",
        "--task": "auto generate",
        "--grammar-backend": "llguidance",
        "--guided-decoding-backend": "auto guidance",
    }
)


class _HelpFormatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # the names of flags stay whole


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def make_parser(*, serve: bool = False) -> argparse.ArgumentParser:
    """Return the parser of `minisgl FLAGS`, or of `minisgl serve [MODEL] FLAGS` without its first word."""
    parser = _Parser(
        prog="minisgl",
        usage="minisgl [serve [MODEL]] [FLAGS]",
        description="Serve a language model behind an OpenAI-compatible API. minisgl serve MODEL is the same as "
        "minisgl --model MODEL.",
        epilog="minisgl verify MODEL compares a model with transformers on this machine; minisgl doctor tells what "
        "works here.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    if serve:
        parser.add_argument("bare_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    add_flags(parser.add_argument_group("model"), SourceConfig)
    add_flags(parser.add_argument_group("server"), ServerConfig)
    http = parser.add_argument_group("http")
    add_flags(http, HttpConfig)
    http.add_argument("--api-key-file", metavar="FILE", help="more keys, one a line")
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    add_flags(parser.add_argument_group("scheduler"), SchedulerConfig)
    same = parser.add_argument_group("accepted without effect")
    same.add_argument("--moe-backend", choices=("auto", "fused"), help="each device has one implementation of experts")
    same.add_argument(
        *("--expert-parallel-size", "--ep-size", "--ep"),
        type=int,
        default=1,
        metavar="N",
        help="equal to --tp: stands for --enable-expert-parallel; 1: no effect",
    )
    for flag, why in NO_EFFECT.items():
        same.add_argument(flag, action="append_const", const=flag, dest="no_effect", help=why)
    return parser


def _refuse_unknown(words: Sequence[str]) -> None:
    """Raise ConfigError for the first unknown word, with what to do instead if that is known."""
    if not words:
        return
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), words[0])
    if (advice := NO_SUCH_FLAG.get(flag)) is not None:
        raise ConfigError(f"there is no {flag}: {advice}")
    if not flag.startswith("-"):
        raise ConfigError(f"unrecognized argument {flag}: write --model {flag}, or minisgl serve {flag}")
    known = [option for action in make_parser()._actions for option in action.option_strings]
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)  # with less, most advice would mislead
    raise ConfigError(f"there is no {flag}" + (f"; {close[0]} is the closest" if close else "; see minisgl --help"))


def _check_text(words: Sequence[str]) -> None:
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:  # Python represents undecodable bytes as surrogates
            raise ConfigError(f"the argument {word!r} is not UTF-8") from None


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """Return the arguments with underscores in flags replaced by dashes (--max_model_len), as vLLM does."""
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        words.append(flag.replace("_", "-") + equals + value if flag.startswith("--") else word)
    return words


def _without_neutral(words: Sequence[str]) -> list[str]:
    """Return the arguments without flags that we do not have and whose values ask for what is so in any case."""
    kept: list[str] = []
    left = deque(words)
    while left:
        flag, equals, value = left[0].partition("=")
        given = value if equals else "".join(islice(left, 1, 2))
        if given in NEUTRAL_VALUES.get(flag, "").split():
            logger.info("%s %s has no effect: it asks for what is so in any case", flag, given)
            if not equals:
                left.popleft()
            left.popleft()
        else:
            kept.append(left.popleft())
    return kept


def api_keys(flags: Sequence[str], file: str | None, environment: str) -> list[str]:
    """Return the keys of the flag, the file (one a line) and the environment (separated by commas)."""
    keys = [*flags, *filter(None, map(str.strip, environment.split(",")))]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"--api-key-file {file} has no key")  # without keys the server would be open to all
        keys += found
    return keys


def parse_args(argv: Sequence[str]) -> tuple[ServerConfig, Callable[[], ModelFolders]]:
    """Return the configuration without the model's folders, and a function that finds (or downloads) these.

    Both raise ConfigError.
    """
    _check_text(argv)
    serve = list(argv[:1]) == ["serve"]
    args, unknown = make_parser(serve=serve).parse_known_args(_without_neutral(_with_dashes(argv[serve:])))
    _refuse_unknown(unknown)
    for flag in args.no_effect or ():
        logger.info("%s has no effect: %s", flag, NO_EFFECT[flag])
    source = SourceConfig(**read_flags(args, SourceConfig))
    if serve and args.bare_model is not None:
        source = msgspec.structs.replace(source, model=args.bare_model)
    engine = EngineConfig(model_path="", **read_flags(args, EngineConfig))
    if args.expert_parallel_size not in (1, engine.tp_size):
        raise ConfigError(f"--ep-size must be 1 or as many as --tp, not {args.expert_parallel_size}")
    if args.expert_parallel_size > 1:
        engine = msgspec.structs.replace(engine, expert_parallel=True)
    http = HttpConfig(**read_flags(args, HttpConfig))
    keys = api_keys(http.api_keys, args.api_key_file, os.environ.get("MINISGL_API_KEY", ""))
    server = read_flags(args, ServerConfig)
    if server.get("num_tokenizers") == 0:  # Mini-SGLang's default: tokenizer and detokenizer share a process
        server["num_tokenizers"] = 1
    admin_key = os.environ.get("MINISGL_ADMIN_API_KEY") or None if http.admin_api_key is None else http.admin_api_key
    # Clients that read a tokenizer from a folder often use the folder as the model's name, too.
    names = {"model_names": tuple(dict.fromkeys([model_name(source.model), source.model]))}
    config = ServerConfig(
        source=source,
        engine=engine,
        scheduler=SchedulerConfig(**read_flags(args, SchedulerConfig)),
        http=msgspec.structs.replace(http, api_keys=tuple(keys), admin_api_key=admin_key),
        **{**names, **server},
    )
    config.validate()
    return config, lambda: find_model(source, weights=engine.load_format != "dummy")


def model_name(model: str) -> str:
    """Return the model's name for clients: a hub id unchanged, of a folder its last part."""
    return Path(model).resolve().name if os.path.isdir(model) else model  # False, not an error, for any text

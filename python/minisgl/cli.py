"""The command line: flags -> ServerConfig. Names and aliases of Mini-SGLang's command line are understood."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from minisgl import __version__
from minisgl.config import ConfigError, EngineConfig, HttpConfig, SchedulerConfig, ServerConfig, SourceConfig
from minisgl.models.hub import model_folder
from minisgl.settings import add_flags, read_flags

logger = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m minisgl",
        description="Serve a language model behind an OpenAI-compatible API.",
        epilog="python -m minisgl verify MODEL compares a model with transformers on this machine; "
        "python -m minisgl doctor tells what works here.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    add_flags(parser.add_argument_group("model"), SourceConfig)
    add_flags(parser.add_argument_group("server"), ServerConfig)
    http = parser.add_argument_group("http")
    add_flags(http, HttpConfig)
    http.add_argument("--api-key-file", metavar="FILE", help="more keys, one a line")
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    add_flags(parser.add_argument_group("scheduler"), SchedulerConfig)
    same = parser.add_argument_group("accepted for Mini-SGLang, without effect")
    same.add_argument("--disable-pynccl", action="store_true", help="NCCL is used through torch")
    same.add_argument("--moe-backend", choices=("auto", "fused"), help="experts have one way on each device")
    return parser


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
            raise ConfigError(f"--api-key-file {file} has no key")  # and must not mean: open to all
        keys += found
    return keys


def parse_args(argv: Sequence[str]) -> tuple[ServerConfig, Callable[[], Path]]:
    """Return the configuration, still without `model_path`, and what finds (or downloads) that folder.

    Both raise ConfigError.
    """
    args = make_parser().parse_args(argv)
    if args.disable_pynccl:
        logger.info("--disable-pynccl has no effect")
    source = SourceConfig(**read_flags(args, SourceConfig))
    engine = EngineConfig(model_path="", **read_flags(args, EngineConfig))
    http = HttpConfig(**read_flags(args, HttpConfig))
    keys = api_keys(http.api_keys, args.api_key_file, os.environ.get("MINISGL_API_KEY", ""))
    # Clients that read a tokenizer from a folder often use the folder as the model's name, too.
    names = {"model_names": tuple(dict.fromkeys([model_name(source.model), source.model]))}
    config = ServerConfig(
        source=source,
        engine=engine,
        scheduler=SchedulerConfig(**read_flags(args, SchedulerConfig)),
        http=msgspec.structs.replace(http, api_keys=tuple(keys)),
        **{**names, **read_flags(args, ServerConfig)},
    )
    config.validate()
    return config, lambda: model_folder(source.model, weights=engine.load_format != "dummy")


def model_name(model: str) -> str:
    """Return what clients call it: a hub id as it is, a folder by its last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model

"""Sampling defaults that a model's publisher recommends: generation_config.json, applied as vLLM does."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from minisgl.config import ConfigError, SamplingDefaults
from minisgl.limits import MAX_OPENAI_TEMPERATURE, UNLIMITED
from minisgl.sampling_params import InvalidRequest, SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
_WAY_OUT = "--generation-config vllm leaves it aside"


def load_sampling_defaults(choice: str, folder: Path) -> SamplingDefaults:
    """Return the sampling defaults that `--generation-config` means for the model in `folder`, and log them.

    `choice` is auto (the model's file, if it has one), vllm (none) or a folder with such a file. ConfigError if the
    file cannot be read or has values that no request may have. As in vLLM `do_sample` is ignored.
    """
    if choice == "vllm":
        return SamplingDefaults()
    path = (folder if choice == "auto" else Path(choice)) / FILE
    if not path.is_file():
        if choice != "auto":
            raise ConfigError(f"--generation-config must be auto, vllm or a folder with {FILE}, not {choice}")
        return SamplingDefaults()
    try:
        defaults = msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
        check = SamplingParams(**defaults.fields, max_tokens=defaults.max_new_tokens)
        check.validate(UNLIMITED)
    except (msgspec.MsgspecError, InvalidRequest, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; {_WAY_OUT}") from None
    if check.temperature > MAX_OPENAI_TEMPERATURE:
        raise ConfigError(f"{path}: temperature must be at most {MAX_OPENAI_TEMPERATURE:g}; {_WAY_OUT}")
    if found := msgspec.to_builtins(defaults):
        said = ", ".join(f"{name} {value:g}" for name, value in found.items())
        logger.info("sampling defaults from %s: %s; --generation-config vllm switches them off", path, said)
    return defaults

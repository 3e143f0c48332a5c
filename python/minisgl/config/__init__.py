"""The configuration: plain frozen structs, made once from the command line or by LLM, validated once.

They travel to the worker processes as JSON over the control pipe (`message.control`).

Each setting is declared in this folder and nowhere else, as a field whose type is `Annotated` with a `Setting`. From
the declaration `settings` makes its flag, its line in --help, the check of its bounds or choices and, for the model's
source, the engine and the scheduler, its keyword of `LLM`. To add a setting, declare the field and read it where it is
needed:

    class HttpConfig(...):
        max_choices: Annotated[int, Setting("choices of a prompt: n, best_of", ge=1)] = 64

makes `--max-choices N`, which refuses values below 1; the API server reads `config.http.max_choices`. A `Literal` type
makes choices; `int | None` is optional, and its help says what None means; a bool's flag sets the opposite of its
default. Only conditions on several fields are checked by hand, in `validate`.
"""

from __future__ import annotations

from minisgl.config.engine import EngineConfig
from minisgl.config.http import HttpConfig
from minisgl.config.scheduler import SchedulerConfig
from minisgl.config.server import ServerConfig
from minisgl.config.settings import ConfigError
from minisgl.config.source import DEMO_MODEL, SamplingDefaults, SourceConfig

__all__ = [
    "DEMO_MODEL",
    "ConfigError",
    "EngineConfig",
    "HttpConfig",
    "SamplingDefaults",
    "SchedulerConfig",
    "ServerConfig",
    "SourceConfig",
]

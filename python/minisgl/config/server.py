"""Configuration of the whole server: the structs of its parts, and settings that belong to no part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from minisgl.config.engine import EngineConfig
from minisgl.config.http import HttpConfig
from minisgl.config.kv_events import KVEventsConfig
from minisgl.config.scheduler import SchedulerConfig
from minisgl.config.settings import ConfigError, Setting, Settings, seconds
from minisgl.config.source import SamplingDefaults, SourceConfig
from minisgl.pooling.pooling_config import PoolingConfig

DEFAULT_PORT = 1919

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
ToolCallParserName = Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "harmony"]
ReasoningParserName = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "harmony"]


class ServerConfig(Settings, frozen=True, kw_only=True):
    """The whole server."""

    source: SourceConfig = SourceConfig()
    tokenizer_path: str = ""  # a local folder; "": the model's
    engine: EngineConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    http: HttpConfig = HttpConfig()
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # read from the model's folder
    pooling: PoolingConfig | None = None  # read from the model's folder; None: the model generates
    model_names: Annotated[
        tuple[str, ...],
        Setting(
            "names of the model for clients; answers have the first; none: the hub id, or the folder's name and path",
            flags=("--served-model-name",),
            metavar="NAME",
        ),
    ] = ()
    host: Annotated[str, Setting("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Setting("TCP port to listen on; 0: any free one", ge=0, le=65535)] = DEFAULT_PORT
    uds: Annotated[
        str | None,
        Setting(
            "Unix domain socket to listen on, to which the umask says who may connect; --host and --port then have no "
            "effect",
            metavar="PATH",
        ),
    ] = None
    num_tokenizers: Annotated[
        int,
        Setting(
            "tokenizer processes; 0 is understood as 1",
            flags=("--num-tokenizer", "--tokenizer-count"),
            aliases=("--tokenizer-worker-num",),
            ge=0,
            le=64,
        ),
    ] = 1
    tool_call_parser: Annotated[
        ToolCallParserName,
        Setting(
            "form of the model's tool calls; auto: as its chat template shows",
            values={  # names of vLLM and SGLang
                "qwen": "hermes",
                "qwen25": "hermes",
                "qwen3_xml": "qwen3_coder",
                "llama3": "llama3_json",
                "llama4_pythonic": "pythonic",
                "llama4_json": "llama3_json",
                "openai": "harmony",
                "gpt-oss": "harmony",
            },
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParserName,
        Setting(
            "form of the model's reasoning; auto: as its chat template shows",
            values={"openai_gptoss": "harmony", "gptoss": "harmony", "gpt-oss": "harmony"},  # names of vLLM and SGLang
        ),
    ] = "auto"
    structured_output_additional_properties: Annotated[
        bool,
        Setting(
            "let objects have keys that their schema does not name, unless it forbids them, as in JSON Schema; without "
            "this flag they may only if it allows them, as with xgrammar in vLLM and SGLang"
        ),
    ] = False
    kv_events_config: Annotated[
        str | None,
        Setting(
            "JSON that says where KV events are published for routers, as in vLLM; on loopback unless it names an "
            "endpoint; none: nowhere",
            metavar="JSON",
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Setting(
            "URL of an OpenTelemetry collector (OTLP over HTTP) for traces of requests, such as "
            "http://localhost:4318; needs the extra otel; none: no traces",
            aliases=("--otlp-traces-endpoint",),
            metavar="URL",
        ),
    ] = None
    shutdown_timeout: Annotated[
        float,
        seconds(
            "time from SIGTERM to the server's end, in which running requests may finish; must be less than the time "
            "after which SIGKILL follows (Kubernetes 30, Docker 10); 0: end at once",
            ge=0,
        ),
    ] = 25.0
    log_level: Annotated[LogLevel, Setting("least level of log lines", aliases=("--uvicorn-log-level",))] = "info"
    log_format: Annotated[LogFormat, Setting("json: a log line is an object with time, level, process and message")] = (
        "text"
    )
    access_log: Annotated[
        bool,
        Setting(
            "log no line for each request with its method, path, status and milliseconds; probes of /health, /ready, "
            "/ping and /metrics have theirs only at --log-level debug",
            flags=("--disable-access-log",),
            aliases=("--no-access-log", "--disable-uvicorn-access-log"),
            switches={"--access-log": True},
        ),
    ] = True
    shell: Annotated[
        bool, Setting("chat in the terminal; the server ends with it", flags=("--shell", "--shell-mode"))
    ] = False

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Configuration of KV events; None: none are published. ConfigError if the JSON is invalid."""
        return None if self.kv_events_config is None else KVEventsConfig.parse(self.kv_events_config)

    @property
    def model_name(self) -> str:
        """Name of the model in answers."""
        return self.model_names[0]

    @property
    def tokenizer_folder(self) -> Path:
        """Local folder of the tokenizer and its chat templates."""
        return Path(self.tokenizer_path or self.engine.model_path)

    def located(self, model: Path, tokenizer: Path) -> ServerConfig:
        """Return this configuration with the local folders of its model and tokenizer, for all processes."""
        engine = msgspec.structs.replace(self.engine, model_path=str(model.resolve()))
        return msgspec.structs.replace(self, engine=engine, tokenizer_path=str(tokenizer.resolve()))

    def validate(self) -> None:
        super().validate()
        for part in (self.source, self.engine, self.scheduler, self.http):
            part.validate()
        if self.kv_events is not None and self.scheduler.cache != "radix":
            raise ConfigError("--kv-events-config needs --cache radix: without it no prefix is cached")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint must be http://HOST:PORT or https://..., not {self.otlp_endpoint}")
        if self.uds == "":
            raise ConfigError("--uds: the path must not be empty")
        if self.shell and self.uds is not None:
            raise ConfigError("--shell does not reach a Unix domain socket: leave --uds out")
        if self.shell and self.http.ssl_certfile is not None:
            raise ConfigError("--shell does not speak https: start it by itself, or leave --ssl-certfile out")
        if not all(self.model_names):
            raise ConfigError("--served-model-name: a name must not be empty")

"""The configuration: plain frozen structs, made once from the command line or by LLM, validated once.

They travel to the worker processes as JSON over the control pipe (`message.control`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from minisgl.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS, Limits

DEFAULT_PORT = 1919

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float16", "bfloat16", "float32"]
LoadFormat = Literal["safetensors", "dummy"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
CacheType = Literal["radix", "naive"]
KVCacheDtype = Literal["auto", "fp8_e4m3"]
BatchPolicyName = Literal["prefill-first", "mixed"]
SchedulePolicy = Literal["fcfs", "lpm"]
DEFAULT_PAGE_SIZE = 64
ATTENTION_BACKENDS = ("auto", "fa", "fi", "torch")
DECODE_ATTENTION = (*ATTENTION_BACKENDS, "fused")


class ConfigError(ValueError):
    """A configuration that cannot be served. One line that says what to change."""


def attention_names(attention: str) -> tuple[str, str]:
    """The backends for prefill and decode that --attn names; ConfigError for one that is unknown."""
    names = attention.split(",")
    if len(names) > 2 or names[0] not in ATTENTION_BACKENDS or names[-1] not in DECODE_ATTENTION:
        raise ConfigError(
            f"--attn must be one of {', '.join(ATTENTION_BACKENDS)}, or two with a comma (prefill, decode), "
            f"of which the second may also be fused, not {attention}"
        )
    return names[0], names[-1]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine needs: the model, where it runs, and the memory it may use."""

    model_path: str  # a local folder
    device: Device = "auto"
    dtype: Dtype = "auto"  # auto: the checkpoint's
    load_format: LoadFormat = "safetensors"
    attention: str = "auto"  # a backend, or two with a comma: of prefill (and mixed batches) and of decode
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: the model's
    page_size: int = DEFAULT_PAGE_SIZE  # tokens
    num_pages: int | None = None  # None: from the free memory
    memory_ratio: float = 0.9  # share of the device's memory for weights and KV cache
    max_running_requests: int = 256
    max_seq_len: int | None = None  # None: the model's
    cuda_graph_max_bs: int | None = None  # None: max_running_requests; 0: no graphs
    logprobs_mode: LogprobsMode = "raw_logprobs"  # of the model's logits, or of what is made of them before the filters
    tp_size: int = 1

    def validate(self) -> None:
        """Raise ConfigError for the first value outside its range."""
        _check_choices(self)
        attention_names(self.attention)
        if self.page_size < 1:
            raise ConfigError(f"--page-size must be at least 1, not {self.page_size}")
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"--num-pages must be at least 1, not {self.num_pages}")
        if not 1 <= self.tp_size <= 64:
            raise ConfigError(f"--tp must be 1 to 64, not {self.tp_size}")
        if not 0.0 < self.memory_ratio <= 1.0:
            raise ConfigError(f"--memory-ratio must be above 0 and at most 1, not {self.memory_ratio}")
        if not 1 <= self.max_running_requests <= 4096:
            raise ConfigError(f"--max-running-requests must be 1 to 4096, not {self.max_running_requests}")
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(f"--max-seq-len-override must be at least 2, not {self.max_seq_len}")
        if self.cuda_graph_max_bs is not None and self.cuda_graph_max_bs < 0:
            raise ConfigError(f"--cuda-graph-max-bs must be at least 0, not {self.cuda_graph_max_bs}")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler decides by."""

    cache: CacheType = "radix"
    max_prefill_tokens: int = 8192  # tokens of prefill in one step: longer prompts are cut into chunks
    batch_policy: BatchPolicyName = "prefill-first"
    schedule_policy: SchedulePolicy = "fcfs"
    overlap: bool = True  # launch a step before the tokens of the one before it are read

    def validate(self) -> None:
        """Raise ConfigError for the first value outside its range."""
        _check_choices(self)
        if self.max_prefill_tokens < 1:
            raise ConfigError(f"--max-prefill-length must be at least 1, not {self.max_prefill_tokens}")


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call the API server and how."""

    api_keys: tuple[str, ...] = ()  # any of these opens every route; none: all are open
    allowed_origins: tuple[str, ...] = ()  # of web pages, for CORS; none: no CORS headers
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""  # under which a reverse proxy shows the server
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    max_body_bytes: int = 32 * 1024 * 1024  # of one request
    max_queued_requests: int = 8192  # open sequences beyond which requests get 503
    max_choices: int = MAX_CHOICES  # of a prompt: n, best_of
    max_stop_strings: int = MAX_STOP_STRINGS  # of a request
    max_logprobs: int = MAX_LOGPROBS  # alternatives to a token
    receive_timeout: float = 60.0  # seconds for a request to arrive whole
    send_timeout: float = 300.0  # seconds that a client may take nothing of what is sent to it
    health_timeout: float = 60.0  # seconds without a heartbeat after which the server is unhealthy

    def limits(self, engine: Limits) -> Limits:
        """The engine's, with what one request may ask for."""
        return msgspec.structs.replace(
            engine,
            max_choices=self.max_choices,
            max_stop_strings=self.max_stop_strings,
            max_logprobs=self.max_logprobs,
        )

    def validate(self) -> None:
        """Raise ConfigError for the first value outside its range."""
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("--api-key: a key must have at least one character, all of them visible ASCII")
        if "*" in self.allowed_origins and self.allow_credentials:
            raise ConfigError("--allow-credentials needs the --allowed-origins by name, not *")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path must begin with / and not end with it, not {self.root_path}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together")
        for flag, path in {"--ssl-keyfile": self.ssl_keyfile, "--ssl-certfile": self.ssl_certfile}.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag} {path}: there is no such file")
        if self.ssl_keyfile is not None and self.ssl_certfile is not None:
            _check_certificate(self.ssl_keyfile, self.ssl_certfile)
        if self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be at least 1, not {self.max_body_bytes}")
        if self.max_queued_requests < 1:
            raise ConfigError(f"--max-queued-requests must be at least 1, not {self.max_queued_requests}")
        if self.max_choices < 1:
            raise ConfigError(f"--max-choices must be at least 1, not {self.max_choices}")
        if not 0 <= self.max_stop_strings <= MAX_STOP_STRINGS:
            raise ConfigError(f"--max-stop-strings must be 0 to {MAX_STOP_STRINGS}, not {self.max_stop_strings}")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"--max-logprobs must be 0 to {MAX_LOGPROBS}, not {self.max_logprobs}")
        timeouts = {
            "--receive-timeout": self.receive_timeout,
            "--send-timeout": self.send_timeout,
            "--health-timeout": self.health_timeout,
        }
        for flag, seconds in timeouts.items():
            if not 0.0 < seconds <= 86_400.0:
                raise ConfigError(f"{flag} must be above 0 and at most 86400 seconds, not {seconds}")


def _check_certificate(keyfile: str, certfile: str) -> None:
    import ssl  # which no other process needs

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except OSError as error:
        raise ConfigError(f"--ssl-certfile {certfile} and its --ssl-keyfile cannot be used: {error}") from None


def _check_choices(config: msgspec.Struct) -> None:
    """ConfigError for the first field that has none of the values which its type names. Flags cannot; Python can."""
    for field, kind in get_type_hints(type(config)).items():
        value = getattr(config, field)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(f"{field} must be one of {', '.join(get_args(kind))}, not {value}")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole server."""

    engine: EngineConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    http: HttpConfig = HttpConfig()
    model_name: str  # as /v1/models shows it
    model_aliases: tuple[str, ...] = ()  # other names that clients may use
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    num_tokenizers: int = 1
    tool_call_parser: str = "auto"  # how tool calls are found in answers; auto: as the chat template shows
    reasoning_parser: str = "auto"  # the same for thoughts
    shell: bool = False  # chat in the terminal once the server is ready

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.model_name, *self.model_aliases)

    def validate(self) -> None:
        """Raise ConfigError for the first value outside its range."""
        self.engine.validate()
        self.scheduler.validate()
        self.http.validate()
        if self.shell and self.http.ssl_certfile is not None:
            raise ConfigError("--shell does not speak https: start it by itself, or leave --ssl-certfile out")
        if not all(self.model_names):
            raise ConfigError("--served-model-name: a name must not be empty")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be 0 to 65535, not {self.port}")
        if not 1 <= self.num_tokenizers <= 64:
            raise ConfigError(f"--num-tokenizer must be 1 to 64, not {self.num_tokenizers}")

"""The configuration: plain frozen structs, made once from the command line or by LLM, validated once.

They travel to the worker processes as JSON over the control pipe (`message.control`).

Each setting is declared here and nowhere else: a field whose type is `Annotated` with a `Setting`. Its flag, its line
in --help, the check of its bounds or choices and, in the structs of the model's source, the engine and the scheduler,
its keyword of `LLM` follow from that (`minisgl.settings`). To add one, declare the field and read it where it is due:

    class HttpConfig(...):
        max_choices: Annotated[int, Setting("choices of a prompt: n, best_of", metavar="N", ge=1)] = 64

makes `--max-choices N`, refused below 1 by name and limit; the API server reads `config.http.max_choices`. A `Literal`
type makes choices; `int | None` is optional, and None is what its help says; a bool's flag sets the opposite of its
default. Only what several fields must agree on is checked by hand, in `validate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from minisgl.kv_events_config import KVEventsConfig
from minisgl.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS, Limits
from minisgl.pooling.pooling_config import Convert, PoolingConfig, Runner
from minisgl.settings import ConfigError as ConfigError
from minisgl.settings import Setting, Settings

DEMO_MODEL = "demo"  # name of the built-in model for --model and for clients
DEFAULT_PORT = 1919

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float16", "bfloat16", "float32"]
ModelImplementation = Literal["auto", "minisgl", "transformers"]
LoadFormat = Literal["safetensors", "dummy"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
QuantizationMethod = Literal["auto", "fp8", "int8", "int4"]
CacheType = Literal["radix", "naive"]
KVCacheDtype = Literal["auto", "fp8_e4m3"]
BatchPolicyName = Literal["prefill-first", "mixed"]
SchedulePolicy = Literal["fcfs", "lpm"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
ModelSource = Literal["huggingface", "modelscope"]
ToolCallParserName = Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "harmony"]
ReasoningParserName = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "harmony"]
DEFAULT_PAGE_SIZE = 64
ATTENTION_BACKENDS = ("auto", "fa", "fi", "varlen", "latent", "torch")
DECODE_ATTENTION = (*ATTENTION_BACKENDS, "fused")
MAX_SECONDS = 86_400


def attention_names(attention: str) -> tuple[str, str]:
    """Return the backends for prefill and decode that --attn names; ConfigError for one that is unknown."""
    names = attention.split(",")
    if len(names) > 2 or names[0] not in ATTENTION_BACKENDS or names[-1] not in DECODE_ATTENTION:
        raise ConfigError(
            f"--attn must be one of {', '.join(ATTENTION_BACKENDS)}, or two with a comma (prefill, decode), "
            f"of which the second may also be fused, not {attention}"
        )
    return names[0], names[-1]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Values of generation_config.json for what a request leaves out; None: not set there."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None  # cap on every answer, whatever its request says

    @property
    def fields(self) -> dict[str, Any]:
        """The defaults that are set, by the names of a request's fields; without the cap."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        found.pop("max_new_tokens", None)
        return found


class SourceConfig(Settings, frozen=True, kw_only=True):
    """Source of the model: its name, hub, revision, tokenizer and chat template."""

    model: Annotated[
        str,
        Setting(
            "folder or hub id of the model; demo: the built-in one", flags=("--model", "--model-path"), metavar="MODEL"
        ),
    ] = DEMO_MODEL
    model_source: Annotated[
        ModelSource, Setting("hub of the ids of models and tokenizers; modelscope needs the extra of that name")
    ] = "huggingface"
    revision: Annotated[
        str | None, Setting("branch, tag or commit of the model on its hub; none: the newest", metavar="NAME")
    ] = None
    tokenizer: Annotated[
        str | None,
        Setting(
            "folder or hub id of the tokenizer and its chat template; none: the model's",
            aliases=("--tokenizer-path",),
            metavar="MODEL",
        ),
    ] = None
    chat_template: Annotated[
        str | None, Setting("Jinja file of the chat template; none: the tokenizer's", metavar="FILE")
    ] = None

    generation_config: Annotated[
        str,
        Setting(
            "sampling defaults: auto: of the model's generation_config.json; vllm: none; or of a folder with such "
            "a file",
            metavar="FOLDER",
        ),
    ] = "auto"

    def validate(self) -> None:
        super().validate()
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"--chat-template {self.chat_template}: there is no such file")


class EngineConfig(Settings, frozen=True, kw_only=True):
    """The engine: its model, where it runs, and the memory it may use."""

    model_path: str  # a local folder
    device: Annotated[Device, Setting("auto: cuda if there is one")] = "auto"
    dtype: Annotated[
        Dtype,
        Setting("of weights and computation; auto: the checkpoint's", values={"half": "float16", "float": "float32"}),
    ] = "auto"
    runner: Annotated[
        Runner,
        Setting(
            "generate: text; pooling: embeddings, scores or classes; auto: pooling if the folder has a modules.json of "
            "sentence-transformers or the architecture no head for text",
            switches={"--is-embedding": "pooling"},
        ),
    ] = "auto"
    convert: Annotated[
        Convert,
        Setting(
            "what a pooling model makes: embed: embeddings; classify: classes, or of a causal reranker the score that "
            "it answers yes; auto: as the architecture and modules.json say",
            values={"none": "auto"},
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Setting("dummy: random weights", switches={"--dummy-weight": "dummy"}, values={"auto": "safetensors"}),
    ] = "safetensors"
    model_impl: Annotated[
        ModelImplementation,
        Setting(
            "who computes the model; auto: this package if it knows the architecture, else transformers' modules with "
            "attention over the paged KV cache",
            values={"vllm": "minisgl", "sglang": "minisgl"},
        ),
    ] = "auto"
    quantization: Annotated[
        QuantizationMethod,
        Setting(
            "auto: matrices as the checkpoint has them; fp8, int8, int4: rounded to these as they are loaded",
            values=dict.fromkeys(("awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "mxfp4"), "auto"),
        ),
    ] = "auto"
    fp8_activations: Annotated[
        bool,
        Setting("round activations to FP8, too, where the checkpoint's format does and a GPU multiplies FP8"),
    ] = False
    attention: Annotated[
        str,
        Setting(
            "attention: auto, fa, fi, varlen or torch, or two with a comma: for prefill (and mixed batches), for "
            "decode (there also fused)",
            flags=("--attn", "--attention-backend"),
            metavar="NAME",
            keyword="attention_backend",
            values={
                "fa3": "fa",
                "flash_attn": "fa",
                "flashinfer": "fi",
                "trtllm": "fi",
                "trtllm_mha": "fi",
                "torch_native": "torch",
                "torch_sdpa": "torch",
            },
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Setting(
            "type of the stored K and V; auto: the model's dtype; fp8_e4m3: 8 bits, so twice as many fit",
            values={"fp8": "fp8_e4m3"},
        ),
    ] = "auto"
    page_size: Annotated[
        int, Setting("tokens of a page of the KV cache", aliases=("--block-size",), metavar="TOKENS", ge=1)
    ] = DEFAULT_PAGE_SIZE
    num_pages: Annotated[
        int | None,
        Setting(
            "pages in the KV cache; none: as memory allows",
            aliases=("--num-gpu-blocks-override",),
            metavar="PAGES",
            keyword="num_page_override",
            ge=1,
        ),
    ] = None
    window_ratio: Annotated[
        float | None,
        Setting(
            "pages of layers with a sliding window for each page of the others; none: what usual sequences need",
            aliases=("--swa-full-tokens-ratio",),
            metavar="RATIO",
            gt=0,
            le=1,
        ),
    ] = None
    memory_ratio: Annotated[
        float,
        Setting(
            "share of the GPU's memory for weights and KV cache; on the CPU, of the free memory for the KV cache, "
            "at most 8 GiB, and for 16 sequences of full length",
            aliases=("--gpu-memory-utilization", "--mem-fraction-static"),
            metavar="RATIO",
            gt=0,
            le=1,
        ),
    ] = 0.9
    max_running_requests: Annotated[
        int,
        Setting(
            "requests that run at the same time",
            aliases=("--max-num-seqs",),
            metavar="N",
            keyword="max_running_req",
            ge=1,
            le=4096,
        ),
    ] = 256
    state_snapshots: Annotated[
        int | None,
        Setting(
            "states of recurrent layers (hybrid models) kept behind cached prefixes, from which later prompts go on; "
            "0: no prefix is reused; none: as memory allows",
            metavar="N",
            ge=0,
        ),
    ] = None
    max_seq_len: Annotated[
        int | None,
        Setting(
            "context length; none: the model's",
            flags=("--max-seq-len-override",),
            aliases=("--max-model-len", "--context-length"),
            metavar="TOKENS",
            keyword="max_seq_len_override",
            ge=2,
        ),
    ] = None
    cuda_graph_max_bs: Annotated[
        int | None,
        Setting(
            "largest decode batch in a CUDA graph; 0: no graphs; none: --max-running-requests",
            flags=("--cuda-graph-max-bs", "--graph"),
            aliases=("--max-cudagraph-capture-size",),
            metavar="ROWS",
            switches={"--enforce-eager": 0, "--disable-cuda-graph": 0},
            ge=0,
        ),
    ] = None
    logprobs_mode: Annotated[
        LogprobsMode,
        Setting("log-probabilities of the model's logits, or after penalties, biases, masks and temperature"),
    ] = "raw_logprobs"
    tp_size: Annotated[
        int,
        Setting(
            "GPUs, or processes on the CPU, that hold the model together",
            flags=("--tp", "--tp-size", "--tensor-parallel-size"),
            aliases=("-tp",),
            metavar="N",
            ge=1,
            le=64,
        ),
    ] = 1
    custom_all_reduce: Annotated[
        bool,
        Setting("leave every sum over GPUs to NCCL, small ones too", flags=("--disable-custom-all-reduce",)),
    ] = True
    hang_timeout: Annotated[
        float,
        Setting(
            "after which a rank that hangs ends all: it gives no sign of life, or no step ends and no CPU computes it; "
            "longer than any step on a GPU; 0: never",
            aliases=("--watchdog-timeout",),
            metavar="SECONDS",
            ge=0,
            le=MAX_SECONDS,
            unit="seconds",
        ),
    ] = 20.0

    def validate(self) -> None:
        super().validate()
        attention_names(self.attention)


class SchedulerConfig(Settings, frozen=True, kw_only=True):
    """The scheduler: its cache, its policies and the size of its steps."""

    cache: Annotated[
        CacheType,
        Setting(
            "radix: reuse shared prefixes",
            flags=("--cache", "--cache-type"),
            keyword="cache_type",
            switches={
                "--enable-prefix-caching": "radix",
                "--no-enable-prefix-caching": "naive",
                "--disable-radix-cache": "naive",
            },
        ),
    ] = "radix"
    max_prefill_tokens: Annotated[
        int,
        Setting(
            "prompt tokens computed in one step; longer prompts are cut into chunks",
            flags=("--max-prefill-length", "--max-extend-length"),
            aliases=("--max-num-batched-tokens", "--chunked-prefill-size"),
            metavar="TOKENS",
            keyword="max_extend_tokens",
            ge=1,
        ),
    ] = 8192
    batch_policy: Annotated[
        BatchPolicyName,
        Setting(
            "mixed: every decode in every step, and prompts in what --target-tbt leaves; prefill-first: prompts before "
            "decodes",
            switches={"--enable-mixed-chunk": "mixed"},
        ),
    ] = "mixed"
    target_tbt: Annotated[
        float,
        Setting(
            "time that a step of --batch-policy mixed may take while somebody waits for the next token; 0: no bound "
            "but --max-prefill-length",
            metavar="MILLISECONDS",
            ge=0,
            le=MAX_SECONDS * 1000,
            unit="milliseconds",
        ),
    ] = 35.0
    schedule_policy: Annotated[
        SchedulePolicy, Setting("who enters first: fcfs: who came first; lpm: longest cached prefix")
    ] = "fcfs"
    state_snapshot_distance: Annotated[
        int,
        Setting(
            "tokens between the snapshots of a sequence, at least: each adds a step to a prompt",
            metavar="TOKENS",
            ge=1,
        ),
    ] = 512
    overlap: Annotated[
        bool,
        Setting(
            "read each step's tokens before launching the next step",
            flags=("--disable-overlap",),
            aliases=("--disable-overlap-schedule", "--no-async-scheduling"),
        ),
    ] = True


class HttpConfig(Settings, frozen=True, kw_only=True):
    """Who may call the API server and how."""

    api_keys: Annotated[
        tuple[str, ...],
        Setting(
            "clients must send one of these as bearer token; none: all routes are open; better in MINISGL_API_KEY "
            "or a file: others see flags",
            flags=("--api-key",),
            metavar="KEY",
        ),
    ] = ()
    admin_api_key: Annotated[
        str | None,
        Setting(
            "key that /flush_cache, /abort and their like want instead of --api-key; better in "
            "MINISGL_ADMIN_API_KEY; none: what opens the other routes opens these",
            metavar="KEY",
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            "names of the server in clients' Host headers, besides localhost and addresses; * for any; none: any, "
            "unless --host is a loopback address",
            metavar="NAME",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Setting("web pages of other origins that may call (CORS); * for all; none: they are refused", metavar="ORIGIN"),
    ] = ()
    allowed_methods: Annotated[tuple[str, ...], Setting("that such pages may use", metavar="METHOD")] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Setting("that such pages may send", metavar="HEADER")] = ("*",)
    allow_credentials: Annotated[bool, Setting("such pages may send cookies")] = False
    root_path: Annotated[
        str, Setting("that a reverse proxy puts before every route", aliases=("--fastapi-root-path",), metavar="PATH")
    ] = ""
    ssl_keyfile: Annotated[str | None, Setting("private key, for https", metavar="FILE")] = None
    ssl_certfile: Annotated[str | None, Setting("certificate, for https", metavar="FILE")] = None
    max_body_bytes: Annotated[int, Setting("largest body of a request", metavar="BYTES", ge=1)] = 8 * 1024 * 1024
    ui: Annotated[
        bool, Setting("no page at / that shows the server at work, and no /debug/state", flags=("--disable-ui",))
    ] = True
    response_store: Annotated[
        str | None,
        Setting("SQLite file that keeps the responses of /v1/responses; none: they are not kept", metavar="FILE"),
    ] = None
    response_store_bytes: Annotated[
        int, Setting("of responses that are kept: the oldest make room", metavar="BYTES", ge=1)
    ] = 1024**3
    max_queued_requests: Annotated[
        int, Setting("sequences (each choice is one) running or waiting; further requests get 503", metavar="N", ge=1)
    ] = 8192
    max_choices: Annotated[int, Setting("choices of a prompt: n, best_of", metavar="N", ge=1)] = MAX_CHOICES
    max_stop_strings: Annotated[int, Setting("stop strings of a request", metavar="N", ge=0, le=MAX_STOP_STRINGS)] = (
        MAX_STOP_STRINGS
    )
    max_logprobs: Annotated[
        int, Setting("alternatives per token that a request may ask for", metavar="N", ge=0, le=MAX_LOGPROBS)
    ] = MAX_LOGPROBS
    receive_timeout: Annotated[
        float, Setting("for a request to arrive whole", metavar="SECONDS", gt=0, le=MAX_SECONDS, unit="seconds")
    ] = 60.0
    send_timeout: Annotated[
        float,
        Setting(
            "after which a client that accepts no data is disconnected",
            metavar="SECONDS",
            gt=0,
            le=MAX_SECONDS,
            unit="seconds",
        ),
    ] = 300.0
    health_timeout: Annotated[
        float,
        Setting(
            "without a heartbeat through all processes after which /health fails",
            metavar="SECONDS",
            gt=0,
            le=MAX_SECONDS,
            unit="seconds",
        ),
    ] = 60.0

    def limits(self, engine: Limits) -> Limits:
        """Return the engine's limits, with what one request may ask for."""
        return msgspec.structs.replace(
            engine, max_choices=self.max_choices, max_stop_strings=self.max_stop_strings, max_logprobs=self.max_logprobs
        )

    def validate(self) -> None:
        super().validate()
        admin_keys = () if self.admin_api_key is None else (self.admin_api_key,)
        for flag, keys in {"--api-key": self.api_keys, "--admin-api-key": admin_keys}.items():
            if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
                raise ConfigError(f"{flag}: a key must have at least one character, all of them visible ASCII")
        if "*" in self.allowed_origins and self.allow_credentials:
            raise ConfigError("--allow-credentials needs the --allowed-origins by name, not *")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path must begin with / and not end with it, not {self.root_path}")
        if self.response_store is not None and not Path(self.response_store).absolute().parent.is_dir():
            raise ConfigError(f"--response-store {self.response_store}: there is no such folder")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together")
        for flag, path in {"--ssl-keyfile": self.ssl_keyfile, "--ssl-certfile": self.ssl_certfile}.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag} {path}: there is no such file")
        if self.ssl_keyfile is not None and self.ssl_certfile is not None:
            _check_certificate(self.ssl_keyfile, self.ssl_certfile)


def _check_certificate(keyfile: str, certfile: str) -> None:
    import ssl  # which no other process needs

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except OSError as error:
        raise ConfigError(f"--ssl-certfile {certfile} and its --ssl-keyfile cannot be used: {error}") from None


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
            "what clients call the model; the first name is in the answers; none: the hub id, or the folder",
            flags=("--served-model-name",),
            metavar="NAME",
        ),
    ] = ()
    host: Annotated[str, Setting("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Setting("TCP port to listen on; 0: any free one", ge=0, le=65535)] = DEFAULT_PORT
    num_tokenizers: Annotated[
        int,
        Setting(
            "tokenizer processes; 0 is understood as 1",
            flags=("--num-tokenizer", "--tokenizer-count"),
            metavar="N",
            ge=0,
            le=64,
        ),
    ] = 1
    tool_call_parser: Annotated[
        ToolCallParserName,
        Setting(
            "form of the model's tool calls; auto: as its chat template shows",
            values={  # of vLLM and SGLang
                "qwen": "hermes",
                "qwen25": "hermes",
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
            "form of the model's thoughts; auto: as its chat template shows",
            values={"openai_gptoss": "harmony", "gpt-oss": "harmony"},  # of vLLM and SGLang
        ),
    ] = "auto"
    structured_output_additional_properties: Annotated[
        bool,
        Setting(
            "objects may have keys that their schema does not name, unless it forbids them, as in JSON Schema; else, "
            "as with xgrammar in vLLM and SGLang, only if it allows them"
        ),
    ] = False
    kv_events_config: Annotated[
        str | None,
        Setting(
            "JSON that says where events of cached prefixes are published for routers, as in vLLM; on loopback unless "
            "it names an endpoint; none: nowhere",
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
        Setting(
            "from SIGTERM to the server's end, in which running requests may finish; below what follows SIGTERM "
            "with SIGKILL (Kubernetes 30, Docker 10); 0: end at once",
            metavar="SECONDS",
            ge=0,
            le=MAX_SECONDS,
            unit="seconds",
        ),
    ] = 25.0
    log_level: Annotated[LogLevel, Setting("log what is at least this important", aliases=("--uvicorn-log-level",))] = (
        "info"
    )
    log_format: Annotated[LogFormat, Setting("json: a log line is an object: time, level, process, message")] = "text"
    access_log: Annotated[
        bool,
        Setting(
            "no line for each request with its method, path, status and milliseconds; probes of /health, /ready, "
            "/ping and /metrics have theirs at --log-level debug alone",
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
        """Return the places where KV events are published; None: nowhere. ConfigError if the JSON cannot be read."""
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
        """Return this configuration with the folders of its model and tokenizer, as every process reads them."""
        engine = msgspec.structs.replace(self.engine, model_path=str(model.resolve()))
        chat_template = self.source.chat_template and str(Path(self.source.chat_template).resolve())
        source = msgspec.structs.replace(self.source, chat_template=chat_template)
        return msgspec.structs.replace(self, engine=engine, source=source, tokenizer_path=str(tokenizer.resolve()))

    def validate(self) -> None:
        super().validate()
        for part in (self.source, self.engine, self.scheduler, self.http):
            part.validate()
        if self.kv_events is not None and self.scheduler.cache != "radix":
            raise ConfigError("--kv-events-config needs --cache radix: without it no prefix is cached")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint must be http://HOST:PORT or https://..., not {self.otlp_endpoint}")
        if self.shell and self.http.ssl_certfile is not None:
            raise ConfigError("--shell does not speak https: start it by itself, or leave --ssl-certfile out")
        if not all(self.model_names):
            raise ConfigError("--served-model-name: a name must not be empty")

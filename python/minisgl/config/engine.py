"""Configuration of the engine: the form of its weights, its devices, kernels and memory."""

from __future__ import annotations

from typing import Annotated, Literal

from minisgl.config.settings import ConfigError, Setting, Settings, seconds
from minisgl.pooling.pooling_config import Convert, Runner

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float16", "bfloat16", "float32"]
ModelImplementation = Literal["auto", "minisgl", "transformers"]
LoadFormat = Literal["safetensors", "dummy"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
QuantizationMethod = Literal["auto", "fp8", "int8", "int4"]
KVCacheDtype = Literal["auto", "fp8_e4m3"]
DEFAULT_PAGE_SIZE = 64
ATTENTION_BACKENDS = ("auto", "fa", "fi", "varlen", "latent", "torch")
DECODE_ATTENTION = (*ATTENTION_BACKENDS, "fused")


def attention_names(attention: str) -> tuple[str, str]:
    """Return the backends for prefill and decode that --attn names; ConfigError for an unknown one."""
    names = attention.split(",")
    if len(names) > 2 or names[0] not in ATTENTION_BACKENDS or names[-1] not in DECODE_ATTENTION:
        raise ConfigError(
            f"--attn must be one of {', '.join(ATTENTION_BACKENDS)}, or two with a comma (prefill, decode), "
            f"of which the second may also be fused, not {attention}"
        )
    return names[0], names[-1]


class EngineConfig(Settings, frozen=True, kw_only=True):
    """The engine: its model, where it runs, and the memory it may use."""

    model_path: str  # a local folder
    device: Annotated[Device, Setting("device that computes; auto: cuda if there is one")] = "auto"
    dtype: Annotated[
        Dtype,
        Setting(
            "type of weights and computation; auto: the checkpoint's", values={"half": "float16", "float": "float32"}
        ),
    ] = "auto"
    runner: Annotated[
        Runner,
        Setting(
            "generate: text; pooling: embeddings, scores or classes; auto: pooling if the folder has a modules.json of "
            "sentence-transformers, or if the architecture has no head for text",
            switches={"--is-embedding": "pooling"},
        ),
    ] = "auto"
    convert: Annotated[
        Convert,
        Setting(
            "result of a pooling model; embed: embeddings; classify: classes, or for a causal reranker the score of "
            "its answer yes; auto: as the architecture and modules.json say",
            values={"none": "auto"},
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Setting(
            "source of the weights; dummy: random weights",
            switches={"--dummy-weight": "dummy"},
            values={"auto": "safetensors"},
        ),
    ] = "safetensors"
    model_impl: Annotated[
        ModelImplementation,
        Setting(
            "implementation of the model; auto: this package's if it knows the architecture, otherwise transformers' "
            "modules with attention over the paged KV cache",
            values={"vllm": "minisgl", "sglang": "minisgl"},
        ),
    ] = "auto"
    quantization: Annotated[
        QuantizationMethod,
        Setting(
            "format of matrices; auto: the checkpoint's; fp8, int8, int4: rounded to it as they are loaded",
            values=dict.fromkeys(  # checkpoints' formats, which their files name
                "awq gptq awq_marlin gptq_marlin compressed-tensors mxfp4 modelopt modelopt_fp8 fbgemm_fp8".split(),
                "auto",
            ),
        ),
    ] = "auto"
    fp8_activations: Annotated[
        bool,
        Setting(
            "round activations to FP8, too, if the checkpoint's format or --quantization fp8 does, and the GPU "
            "multiplies FP8"
        ),
    ] = False
    attention: Annotated[
        str,
        Setting(
            "attention backend: auto, fa, fi, varlen, latent or torch, or two with a comma, for prefills (and mixed "
            "batches) and for decodes (these also fused)",
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
        int, Setting("tokens per page of the KV cache", aliases=("--block-size",), metavar="TOKENS", ge=1)
    ] = DEFAULT_PAGE_SIZE
    num_pages: Annotated[
        int | None,
        Setting(
            "pages in the KV cache; none: as many as memory allows, up to those that all running requests can use",
            aliases=("--num-gpu-blocks-override",),
            metavar="PAGES",
            keyword="num_page_override",
            ge=1,
        ),
    ] = None
    window_ratio: Annotated[
        float | None,
        Setting(
            "pages of layers with a sliding window for each page of the others; none: as usual sequences need",
            aliases=("--swa-full-tokens-ratio",),
            metavar="RATIO",
            gt=0,
            le=1,
        ),
    ] = None
    memory_ratio: Annotated[
        float,
        Setting(
            "share of the GPU's memory for weights and KV cache; on the CPU, share of the free memory for the KV "
            "cache, which has at most 8 GiB and 16 sequences of full length",
            aliases=("--gpu-memory-utilization", "--mem-fraction-static"),
            metavar="RATIO",
            gt=0,
            le=1,
        ),
    ] = 0.9
    max_running_requests: Annotated[
        int,
        Setting(
            "requests that run at the same time", aliases=("--max-num-seqs",), keyword="max_running_req", ge=1, le=4096
        ),
    ] = 256
    state_snapshots: Annotated[
        int | None,
        Setting(
            "snapshots of recurrent layers' states (hybrid models) kept after cached prefixes, from which later "
            "prompts continue; 0: no prefix is reused; none: as many as fit a quarter of the memory that states leave, "
            "up to 4 for each request that may run",
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
        Setting("logits whose log-probabilities are returned: raw, or after penalties, biases, masks and temperature"),
    ] = "raw_logprobs"
    tp_size: Annotated[
        int,
        Setting(
            "tensor-parallel ranks: GPUs, or processes on the CPU, among which the model is divided",
            flags=("--tp", "--tp-size", "--tensor-parallel-size"),
            aliases=("-tp",),
            ge=1,
            le=64,
        ),
    ] = 1
    custom_all_reduce: Annotated[
        bool, Setting("use NCCL for every all-reduce, small ones too", flags=("--disable-custom-all-reduce",))
    ] = True
    expert_parallel: Annotated[
        bool,
        Setting(
            "with --tp, each rank holds some experts whole, not a part of every one",
            flags=("--enable-expert-parallel",),
            keyword="enable_expert_parallel",
        ),
    ] = False
    hang_timeout: Annotated[
        float,
        seconds(
            "time after which a rank that hangs ends the server: it does not answer, or no step ends and no CPU "
            "computes it; longer than any step on a GPU; 0: never",
            aliases=("--watchdog-timeout",),
            ge=0,
        ),
    ] = 20.0

    @property
    def fp8_kv(self) -> bool:
        """True if K and V are stored in 8 bits."""
        return self.kv_cache_dtype == "fp8_e4m3"

    def validate(self) -> None:
        super().validate()
        attention_names(self.attention)

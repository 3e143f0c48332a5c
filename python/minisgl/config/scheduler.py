"""Configuration of the scheduler: its cache, its policies and the size of its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from minisgl.config.settings import MAX_SECONDS, Setting, Settings

CacheType = Literal["radix", "naive"]
BatchPolicyName = Literal["prefill-first", "mixed"]
SchedulePolicy = Literal["sjf", "fcfs", "lpm"]


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
            "mixed: every decode in every step, and prompts in what --target-tbt leaves, or both in turns where that "
            "is shorter; prefill-first: prompts before decodes, for up to 16 steps in a row",
            switches={"--enable-mixed-chunk": "mixed"},
        ),
    ] = "mixed"
    target_tbt: Annotated[
        float,
        Setting(
            "mean time that a step of --batch-policy mixed (or two, of prompts and of decodes in turns) may take while "
            "a request waits for its next token; where decodes alone take more than half of it, prompts may take as "
            "long as the decodes, and without CUDA graphs of prompts as long as the host launches a step, up to twice "
            "the target; 0: no bound but --max-prefill-length",
            ge=0,
            le=MAX_SECONDS * 1000,
            unit="milliseconds",
        ),
    ] = 35.0
    schedule_policy: Annotated[
        SchedulePolicy,
        Setting(
            "who enters first: sjf: shorter prompts, within bounds; fcfs: who came first; lpm: longest cached prefix"
        ),
    ] = "sjf"
    state_snapshot_distance: Annotated[
        int,
        Setting(
            "tokens between the snapshots of a sequence, at least: each adds a step to a prompt", metavar="TOKENS", ge=1
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

"""Consequences of a setting's declaration: flags, their help, refusals, and LLM's keywords."""

from __future__ import annotations

import argparse
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import pytest

from minisgl.cli import NEUTRAL_VALUES, NO_SUCH_FLAG, make_parser, parse_args
from minisgl.config import ConfigError, EngineConfig, HttpConfig, SchedulerConfig, ServerConfig, SourceConfig
from minisgl.config.server import ReasoningParserName, ToolCallParserName
from minisgl.config.settings import Declaration, Setting, Settings, add_flags, declarations, take_keywords
from minisgl.llm import LLM
from minisgl.parsers.parser_choice import TOOL_CALL_PARSERS
from minisgl.parsers.reasoning import REASONING_FORMATS

PARTS = {SourceConfig: "source", EngineConfig: "engine", SchedulerConfig: "scheduler", HttpConfig: "http"}
STRUCTS: list[type[msgspec.Struct]] = [*PARTS, ServerConfig]
SETTINGS = [(struct, one) for struct in STRUCTS for one in declarations(struct)]
FILES = ("ssl_keyfile", "ssl_certfile", "chat_template")  # flags whose file must exist have their own tests
SETTABLE = [(struct, one) for struct, one in SETTINGS if one.name not in FILES]
BOUNDED = [one for _, one in SETTINGS if (one.setting.ge, one.setting.gt, one.setting.le) != (None, None, None)]


def value_of(config: ServerConfig, struct: type[msgspec.Struct], name: str) -> Any:
    return getattr(getattr(config, PARTS[struct]) if struct in PARTS else config, name)


def another(declared: Declaration) -> tuple[list[str], Any]:
    """A value that is not the default: what stands on the command line, and what it means."""
    if declared.kind is bool:
        return [], not declared.default
    if declared.choices:
        value = declared.choices[-1]
        return [value], value
    if declared.name == "num_tokenizers":  # 0 means 1
        return ["3"], 3
    if declared.kind in (int, float):
        low = next(bound for bound in (declared.setting.ge, 0.5) if bound is not None)
        value = declared.kind(low if low != declared.default else low + 1)
        return [str(value)], value
    if declared.kind is str:
        valid = {"attention": "torch", "root_path": "/some/path", "otlp_endpoint": "http://some"}
        value = {**valid, "kv_events_config": '{"publisher":"zmq"}'}.get(declared.name, "some")
        return [value], value
    words = ["http://some", "http://other"] if declared.name == "allowed_origins" else ["some", "other"]
    return words, tuple(words)


@pytest.mark.parametrize(("struct", "declared"), SETTABLE, ids=lambda one: getattr(one, "name", ""))
def test_each_flag_sets_its_field(struct: type[msgspec.Struct], declared: Declaration) -> None:
    words, value = another(declared)
    for flag in (*declared.flags, *declared.setting.aliases):
        config, _ = parse_args([flag, *words])
        assert value_of(config, struct, declared.name) == value
    default, _ = parse_args([])
    if declared.name != "model_names":  # its default follows from the model
        assert value_of(default, struct, declared.name) == declared.default
    for switch, stands_for in declared.setting.switches.items():
        assert value_of(parse_args([switch])[0], struct, declared.name) == stands_for


@pytest.mark.parametrize("declared", BOUNDED, ids=lambda one: one.name)
def test_a_value_out_of_bounds_is_refused_with_flag_and_limit(declared: Declaration) -> None:
    setting = declared.setting
    below = setting.ge - 1 if setting.ge is not None else setting.gt
    above = None if setting.le is None else setting.le + 1
    assert (below, above) != (None, None)
    for value, limit in ((below, setting.gt if setting.ge is None else setting.ge), (above, setting.le)):
        if value is not None:
            with pytest.raises(ConfigError, match=rf"^{declared.flags[0]} must be .*\b{limit}\b.*, not {value}"):
                parse_args([declared.flags[0], str(value)])
    for value in (setting.ge, setting.le):
        if value is not None:
            declared.check(value)
    declared.check(None)


def test_flags_are_unique_and_all_in_the_help() -> None:
    flags = [flag for _, one in SETTINGS for flag in (*one.flags, *one.setting.aliases, *one.setting.switches)]
    assert len(flags) == len(set(flags))
    shown = make_parser().format_help()
    assert all(flag in shown for flag in flags)
    assert "None" not in shown


def test_an_unknown_choice_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^--dtype must be one of auto, float16, bfloat16, float32, not int3$"):
        parse_args(["--dtype", "int3"])
    with pytest.raises(ConfigError, match="--port: invalid int value: 'high'"):
        parse_args(["--port", "high"])


def test_a_command_line_of_minisglang_runs_unchanged() -> None:
    words = """--model-path demo --dtype bfloat16 --tensor-parallel-size 2 --ep-size 2 --max-running-requests 4
    --graph 2 --max-seq-len-override 512 --memory-ratio 0.5 --disable-pynccl --host 0.0.0.0 --port 2000
    --num-tokenizer 0 --num-pages 9 --max-extend-length 64 --page-size 16 --attn fa,fi --model-source modelscope
    --cache-type naive --moe-backend fused"""
    config, _ = parse_args(words.split())
    assert (config.engine.tp_size, config.engine.cuda_graph_max_bs, config.engine.attention) == (2, 2, "fa,fi")
    assert (config.num_tokenizers, config.source.model_source, config.scheduler.cache) == (1, "modelscope", "naive")
    assert config.engine.expert_parallel
    with pytest.raises(ConfigError, match="--ep-size must be 1 or as many as --tp, not 2"):
        parse_args(["--tp", "4", "--ep-size", "2"])


def test_command_lines_of_vllm_and_sglang_mean_what_they_mean_there() -> None:
    words = """serve owner/name --max_model_len 4096 --gpu-memory-utilization=0.8 --enforce-eager --max-num-seqs 32
    --block-size 16 --no-enable-prefix-caching --max-num-batched-tokens 2048 --dtype half --kv-cache-dtype fp8 -tp 2
    --attention-backend FLASH_ATTN --enable-auto-tool-choice --tool-call-parser llama4_pythonic --load-format auto
    --trust-remote-code"""
    vllm, _ = parse_args(words.split())
    engine = vllm.engine
    assert (vllm.source.model, vllm.model_names) == ("owner/name", ("owner/name",))
    assert (engine.max_seq_len, engine.memory_ratio, engine.cuda_graph_max_bs) == (4096, 0.8, 0)
    assert (engine.max_running_requests, engine.page_size, engine.tp_size) == (32, 16, 2)
    assert (engine.dtype, engine.kv_cache_dtype, engine.attention) == ("float16", "fp8_e4m3", "fa")
    assert (vllm.scheduler.cache, vllm.scheduler.max_prefill_tokens) == ("naive", 2048)
    assert vllm.tool_call_parser == "pythonic"
    words = """--model-path owner/name --context-length 4096 --mem-fraction-static 0.8 --disable-radix-cache --tp 2
    --disable-cuda-graph --chunked-prefill-size 2048 --enable-mixed-chunk --attention-backend fa3 --schedule-policy lpm
    --tool-call-parser qwen25 --reasoning-parser deepseek-r1 --disable-overlap-schedule --served-model-name a b
    --tokenizer-path owner/words"""
    sglang, _ = parse_args(words.split())
    assert (sglang.engine.max_seq_len, sglang.engine.memory_ratio, sglang.engine.attention) == (4096, 0.8, "fa")
    scheduler = sglang.scheduler
    assert (scheduler.cache, scheduler.max_prefill_tokens, scheduler.batch_policy) == ("naive", 2048, "mixed")
    assert not scheduler.overlap
    assert (sglang.tool_call_parser, sglang.reasoning_parser) == ("hermes", "deepseek_r1")
    assert (sglang.model_names, sglang.source.tokenizer) == (("a", "b"), "owner/words")


def test_several_values_may_be_a_json_list_as_in_vllm() -> None:
    words = ["--allowed-origins", '["https://a.example", "null"]', "https://b.example", "--allowed-methods", '["GET"]']
    http = parse_args([*words, "--allowed-headers", "[]", "--allowed-hosts", "[::1]", '["a'])[0].http
    assert http.allowed_origins == ("https://a.example", "null", "https://b.example")
    assert (http.allowed_methods, http.allowed_headers) == (("GET",), ())
    assert http.allowed_hosts == ("[::1]", '["a')
    with pytest.raises(ConfigError, match=r"^--allowed-origins: page must be"):
        parse_args(["--allowed-origins", '["page"]'])


def test_an_unknown_flag_is_refused_with_what_to_do() -> None:
    for words, says in (
        (["--max-total-tokens", "5"], "^there is no --max-total-tokens: give --num-pages"),
        (["--max_total_tokens=5"], "^there is no --max-total-tokens: give --num-pages"),
        (["--max-model-length", "5"], "^there is no --max-model-length; --max-model-len is the closest$"),
        (["--enable-eplb"], "^there is no --enable-eplb; see minisgl --help$"),
        (["--xyzzy"], "^there is no --xyzzy; see minisgl --help$"),
        (["owner/name"], "^unrecognized argument owner/name: write --model owner/name, or minisgl serve owner/name$"),
        (["serve", "owner/name", "other"], "^unrecognized argument other"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_args(words)
    known = [flag for action in make_parser()._actions for flag in action.option_strings]
    assert not set(known) & set(NO_SUCH_FLAG)
    named = [word.rstrip(":;,") for advice in NO_SUCH_FLAG.values() for word in advice.split() if word.startswith("--")]
    assert set(named) <= set(known)


def test_a_value_that_asks_for_what_is_so_in_any_case_refuses_no_flag() -> None:
    assert NEUTRAL_VALUES.keys() <= NO_SUCH_FLAG.keys()
    for flag, values in NEUTRAL_VALUES.items():
        for value in values.split():
            for words in ([flag, value], [f"{flag}={value}"]):
                assert parse_args(["serve", *words, "owner/name"])[0] == parse_args(["--model", "owner/name"])[0]
        for words in ([flag, "7"], [f"{flag}=7"], [flag], [f"{flag}="]):
            with pytest.raises(ConfigError, match=f"^there is no {flag}: "):
                parse_args(words)


def test_arguments_that_are_no_text_are_refused() -> None:
    """Python represents their bytes as surrogates, which no process of the server could be told of."""
    for words in (["--uds", "a\udcff"], ["--host=\udcff"], ["serve", "\udcff"], ["--\udcff"]):
        with pytest.raises(ConfigError, match=r"^the argument '.*\\udcff' is not UTF-8$"):
            parse_args(words)


def test_serve_takes_the_model_as_a_positional_argument() -> None:
    assert parse_args(["serve"])[0].source.model == "demo"
    assert parse_args(["serve", "--tp", "2", "owner/name"])[0].source.model == "owner/name"
    assert parse_args(["serve", "--model", "owner/name"])[0].source.model == "owner/name"


@pytest.mark.parametrize("words", [["--served-model-name", "a", ""], ["--otlp-endpoint", "localhost:4317"]], ids=str)
def test_values_that_nobody_could_use_are_refused_by_name(words: list[str]) -> None:
    """A model without a name, and a collector for gRPC."""
    with pytest.raises(ConfigError, match=f"^{words[0]}[: ]"):
        parse_args(words)


def test_a_model_in_a_folder_has_its_name_and_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    assert parse_args(["--model", str(folder)])[0].model_names == ("some-model", str(folder))
    monkeypatch.chdir(folder)
    assert parse_args(["--model", "."])[0].model_names == ("some-model", ".")


def test_the_declared_parsers_are_those_there_are() -> None:
    assert set(get_args(ToolCallParserName)) == {"auto", "none", "harmony", *TOOL_CALL_PARSERS}
    assert set(get_args(ReasoningParserName)) == {"auto", "none", *REASONING_FORMATS}


def test_processes_get_the_configuration_as_json() -> None:
    config, _ = parse_args(["--tp", "2", "--cache", "naive", "--api-key", "a", "b", "--memory-ratio", "0.5"])
    text = msgspec.json.encode(config)
    assert json.loads(text)["http"]["api_keys"] == ["a", "b"]
    assert msgspec.json.decode(text, type=ServerConfig) == config


class Example(Settings, frozen=True, kw_only=True):
    plain: int = 3  # no setting
    size: Annotated[
        int | None, Setting("a size", aliases=("--how-large",), keyword="how_large", ge=1, le=8, unit="bytes")
    ] = None
    form: Annotated[Literal["round", "flat-out"], Setting("a form", values={"sphere": "round"})] = "round"
    share: Annotated[float, Setting("a share, in %", gt=0)] = 0.5
    few: Annotated[int, Setting("few", le=3, switches={"--some": 3})] = 1
    pair: Annotated[str, Setting("a pair", values={"one": "1"})] = ""
    pairs: Annotated[bool, Setting("no pairs", flags=("--no-pairs",), switches={"--pairs": True})] = True
    names: Annotated[tuple[str, ...], Setting("names")] = ("a", "b")


def test_declarations_read_check_and_describe_values() -> None:
    size, form, share, few, pair, *_ = declarations(Example)
    assert (size.flags, size.keyword, size.kind, size.choices) == (("--size",), "how_large", int, ())
    assert pair.read("ONE,three") == "1,three"
    assert [form.read(text) for text in ("round", "sphere", "flat_out")] == ["round", "round", "flat-out"]
    for declared, value, words in (
        (size, 9, "--size must be 1 to 8 bytes, not 9"),
        (share, 0.0, "--share must be above 0, not 0.0"),
        (share, float("nan"), "--share must be above 0, not nan"),
        (few, 4, "--few must be at most 3, not 4"),
        (form, "square", "form must be one of round, flat-out, not square"),
    ):
        with pytest.raises(ConfigError, match=f"^{words}$"):
            declared.check(value)
    with pytest.raises(ConfigError, match="--size"):
        Example(size=0).validate()


def test_the_help_shows_what_holds_without_the_flag() -> None:
    wide = partial(argparse.HelpFormatter, width=200)
    parser = argparse.ArgumentParser(formatter_class=wide, add_help=False)
    add_flags(parser, Example, defaults={"few": 2})
    assert " ".join(parser.format_help().split()).partition("options: ")[2] == (
        "--size BYTES a size (also --how-large) "
        "--form {round,flat-out} a form (default: round) "
        "--share VALUE a share, in % (default: 0.5) "
        "--few N few (default: 2) "
        "--some stands for --few 3 "
        "--pair VALUE a pair "
        "--no-pairs no pairs "
        "--pairs the opposite of --no-pairs "
        "--names VALUE [VALUE ...] names (default: a b)"
    )


def test_keywords_are_taken_by_their_names() -> None:
    keywords = {"how_large": 2, "share": None, "else": 1}
    assert take_keywords(Example, keywords) == {"size": 2}  # None stands for the default
    assert keywords == {"else": 1}


def test_an_unknown_keyword_of_llm_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"LLM has no keyword pagesize; it has .*\bpage_size\b"):
        LLM("demo", pagesize=4)
    with pytest.raises(TypeError, match="num_pages"):  # the field's name: the keyword is Mini-SGLang's
        LLM("demo", num_pages=4)


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("max_model_len", "max_seq_len_override"),
        ("max_running_requests", "max_running_req"),
        ("enforce_eager", "cuda_graph_max_bs=0"),
        ("disable_radix_cache", "cache_type='naive'"),
        ("disable_overlap_schedule", "overlap=False"),
    ],
)
def test_a_flags_name_as_a_keyword_of_llm_is_answered_with_the_keyword(keyword: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"^LLM has no keyword {keyword}; give {advice}$"):
        LLM("demo", **{keyword: 1})


def test_llm_shows_its_keywords() -> None:
    shown = inspect.signature(LLM).parameters
    minisgl = "model dtype max_seq_len_override max_extend_tokens cuda_graph_max_bs page_size max_running_req"
    minisgl += " num_page_override memory_ratio cache_type attention_backend use_dummy_weight"
    assert set(minisgl.split()) <= shown.keys()
    assert shown["max_extend_tokens"].default == 8192
    assert {"device", "overlap", "tp_size", "kv_cache_dtype"} <= shown.keys()

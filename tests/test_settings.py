"""What follows from the declaration of a setting: flags, their help, refusals, and LLM's keywords."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Literal, get_args

import msgspec
import pytest

from minisgl.cli import make_parser, parse_args
from minisgl.config import (
    ConfigError,
    EngineConfig,
    HttpConfig,
    ReasoningParserName,
    SchedulerConfig,
    ServerConfig,
    SourceConfig,
    ToolCallParserName,
)
from minisgl.llm import LLM
from minisgl.parsers.reasoning import REASONING_FORMATS
from minisgl.parsers.select import TOOL_CALL_PARSERS
from minisgl.settings import Declaration, Setting, check_settings, declarations, take_keywords

PARTS = {SourceConfig: "source", EngineConfig: "engine", SchedulerConfig: "scheduler", HttpConfig: "http"}
STRUCTS: list[type[msgspec.Struct]] = [*PARTS, ServerConfig]
SETTINGS = [(struct, one) for struct in STRUCTS for one in declarations(struct)]
# A certificate must exist (test_api_access has one).
SETTABLE = [(struct, one) for struct, one in SETTINGS if one.name not in ("ssl_keyfile", "ssl_certfile")]
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
    if declared.kind in (int, float):
        low = next(bound for bound in (declared.setting.ge, 0.5) if bound is not None)
        value = declared.kind(low if low != declared.default else low + 1)
        return [str(value)], value
    if declared.kind is str:
        value = {"attention": "torch", "root_path": "/some/path"}.get(declared.name, "some")
        return [value], value
    return ["some", "other"], ("some", "other")


@pytest.mark.parametrize(("struct", "declared"), SETTABLE, ids=lambda one: getattr(one, "name", ""))
def test_each_flag_sets_its_field(struct: type[msgspec.Struct], declared: Declaration) -> None:
    words, value = another(declared)
    for flag in declared.flags:
        config, _ = parse_args([flag, *words])
        assert value_of(config, struct, declared.name) == value
    default, _ = parse_args([])
    if declared.name != "model_names":  # which follow from the model
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
    flags = [flag for _, one in SETTINGS for flag in (*one.flags, *one.setting.switches)]
    assert len(flags) == len(set(flags))
    shown = make_parser().format_help()
    assert all(flag in shown for flag in flags)
    assert "None" not in shown


def test_an_unknown_choice_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^--dtype must be one of auto, float16, bfloat16, float32, not int3$"):
        parse_args(["--dtype", "int3"])
    with pytest.raises(ConfigError, match="--port: invalid int value: 'high'"):
        parse_args(["--port", "high"])


def test_the_declared_parsers_are_those_there_are() -> None:
    assert set(get_args(ToolCallParserName)) == {"auto", "none", *TOOL_CALL_PARSERS}
    assert set(get_args(ReasoningParserName)) == {"auto", "none", *REASONING_FORMATS}


def test_processes_get_the_configuration_as_json() -> None:
    config, _ = parse_args(["--tp", "2", "--cache", "naive", "--api-key", "a", "b", "--memory-ratio", "0.5"])
    text = msgspec.json.encode(config)
    assert json.loads(text)["http"]["api_keys"] == ["a", "b"]
    assert msgspec.json.decode(text, type=ServerConfig) == config


class Example(msgspec.Struct, frozen=True):
    plain: int = 3  # no setting
    size: Annotated[int | None, Setting(help="a size", keyword="how_large", ge=1, le=8, unit="bytes")] = None
    form: Annotated[Literal["round", "flat-out"], Setting(help="a form", values={"sphere": "round"})] = "round"
    share: Annotated[float, Setting(help="a share", gt=0)] = 0.5
    few: Annotated[int, Setting(help="few", le=3)] = 1


def test_what_a_declaration_says() -> None:
    size, form, share, few = declarations(Example)
    assert (size.flags, size.keyword, size.kind, size.choices) == (("--size",), "how_large", int, ())
    assert [form.choose(text) for text in ("round", "sphere", "flat_out")] == ["round", "round", "flat-out"]
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
        check_settings(Example(size=0))


def test_keywords_are_taken_by_their_names() -> None:
    keywords = {"how_large": 2, "share": None, "else": 1}
    assert take_keywords(Example, keywords) == {"size": 2}  # None stands for the default
    assert keywords == {"else": 1}


def test_an_unknown_keyword_of_llm_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"LLM has no keyword pagesize; it has .*\bpage_size\b"):
        LLM("demo", pagesize=4)
    with pytest.raises(TypeError, match="num_pages"):  # the field's name: the keyword is Mini-SGLang's
        LLM("demo", num_pages=4)


def test_llm_shows_its_keywords() -> None:
    shown = inspect.signature(LLM).parameters
    minisgl = "model dtype max_seq_len_override max_extend_tokens cuda_graph_max_bs page_size max_running_req"
    minisgl += " num_page_override memory_ratio cache_type attention_backend use_dummy_weight"
    assert set(minisgl.split()) <= shown.keys()
    assert shown["max_extend_tokens"].default == 8192
    assert {"device", "overlap", "tp_size", "kv_cache_dtype"} <= shown.keys()

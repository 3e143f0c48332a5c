"""Parsers that a chat template shows, and those that the flags name."""

from __future__ import annotations

import pytest

from minisgl.cli import parse_args
from minisgl.config import ConfigError, EngineConfig, ServerConfig
from minisgl.models.hub import demo_folder
from minisgl.parsers.parser_choice import TOOL_CALL_PARSERS, Parsers, long_id, short_id
from minisgl.parsers.streaming import CallStart
from minisgl.tokenizer.tokenizer_config import model_parsers

# What is telling about the templates of each family.
QWEN25 = "{{ '<tool_call>' }} return a json object with function name and arguments within <tool_call></tool_call>"
QWEN3 = QWEN25 + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
QWEN3_CODER = "{{ '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>' }}"
LLAMA_JSON = """{{ 'Respond in the format {"name": function name, "parameters": dictionary of argument name' }}"""
LLAMA_PYTHONIC = "{{ 'Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...)' }}"
MISTRAL = "{{ '[TOOL_CALLS] [' }}"
MISTRAL_NAMED = "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"
MAGISTRAL = MISTRAL_NAMED + "{{ '[THINK]' + thinking + '[/THINK]' }}"
DEEPSEEK_R1 = "{% set content = content.split('</think>')[-1] %}{{ '<｜Assistant｜>' + content }}"
GLM = "{{ '<tool_call>' + name + '<arg_key>' + key + '</arg_key>' }}"
GPT_OSS = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
PLAIN = "{{ '<|im_start|>' + message.role }}"


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning", "call_form"),
    [
        (QWEN25, "hermes", "none", "hermes"),
        (QWEN3, "hermes", "qwen3", "hermes"),
        (QWEN3_CODER, "qwen3_coder", "none", "qwen3_coder"),
        (LLAMA_JSON, "llama3_json", "none", "llama3_json"),
        (LLAMA_PYTHONIC, "pythonic", "none", "pythonic"),
        (MISTRAL, "mistral", "none", "mistral"),
        (MISTRAL_NAMED, "mistral", "none", "mistral_named"),
        (MAGISTRAL, "mistral", "mistral", "mistral_named"),
        (DEEPSEEK_R1, "none", "deepseek_r1", "none"),
        (GLM, "none", "none", "none"),  # looks like another's form
        (GPT_OSS, "harmony", "harmony", "harmony"),
        (PLAIN, "none", "none", "none"),
    ],
)
def test_templates_show_the_parsers(template: str, tool_calls: str, reasoning: str, call_form: str) -> None:
    for templates in ([template], [PLAIN, template]):
        assert Parsers.choose("auto", "auto", templates) == Parsers(tool_calls, reasoning, call_form)
    assert Parsers.choose("none", "none", [template]) == Parsers()
    assert Parsers.choose("pythonic", "qwen3", [template]) == Parsers("pythonic", "qwen3", "pythonic")


def test_no_template_no_parser() -> None:
    assert Parsers.choose("auto", "auto", []) == Parsers()


def test_the_demo_model_has_both() -> None:
    def chosen(*flags: str) -> Parsers:
        config, _ = parse_args(flags)
        engine = EngineConfig(model_path=str(demo_folder()))
        named = ServerConfig(
            engine=engine,
            model_names=("demo",),
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        return model_parsers(named)

    assert chosen() == Parsers("hermes", "qwen3", "hermes")
    assert chosen("--tool-call-parser", "none", "--reasoning-parser", "deepseek-r1") == Parsers("none", "deepseek_r1")
    assert chosen("--tool-call-parser", "llama3").tool_calls == "llama3_json"  # another server's name


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_parser(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be one of auto, none, .*, not magic"):
        parse_args([flag, "magic"])


def test_markers_and_parsers_of_a_request() -> None:
    parsers = Parsers("hermes", "qwen3", "hermes")
    tools = {"f": {"type": "object"}}
    assert parsers.parser(None, reasoning=False, prompt_end="") is None
    assert parsers.parser(tools, reasoning=False, prompt_end="") is not None
    assert parsers.parser({}, reasoning=True, prompt_end="") is not None
    assert Parsers().parser(tools, reasoning=True, prompt_end="") is None
    assert Parsers().markers(tools=True, reasoning=True) == ()
    for name, kind in TOOL_CALL_PARSERS.items():
        assert Parsers(name).markers(tools=True, reasoning=True) == kind.kept


def test_ids_of_calls() -> None:
    for form, length in (("hermes", 29), ("mistral", 9)):
        parser = Parsers(form).parser({"f": {}}, reasoning=False, prompt_end="")
        assert parser is not None
        start, *_ = parser.feed(f'{TOOL_CALL_PARSERS[form].markers[0]}{{"name": "f"}}')
        assert isinstance(start, CallStart)
        assert len(start.id) == length
    ids = {long_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(id.startswith("call_") for id in ids)
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in {short_id() for _ in range(100)})

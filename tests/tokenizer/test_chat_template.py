"""Conversations become the text that transformers makes of them; what fails is the request's error and no other."""

from __future__ import annotations

import itertools
import json
import resource
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import minisgl.tokenizer.template_sandbox as template_sandbox
from minisgl.config import ConfigError, EngineConfig, ServerConfig, SourceConfig
from minisgl.models.hub import demo_folder
from minisgl.sampling_params import InvalidRequest
from minisgl.tokenizer.chat_template import ChatTemplates
from minisgl.tokenizer.text import TextTokenizer
from minisgl.tokenizer.tokenizer_config import model_parsers
from minisgl.tokenizer.tokenizer_worker import describe
from tokenizer import small

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": 'Hi <b>& "you"</b> 世界\n'}
TALK = [
    {"role": "system", "content": "Be brief."},
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None]}}}],
    },
    {"role": "tool", "content": "42"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "né", "parameters": {"b": 1, "a": {}}}}]

CHATML = """
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """{{ bos_token }}{% set ns = namespace(system='') %}
{% for m in messages %}
    {% if m['role'] == 'system' %}
        {% set ns.system = m['content'] %}
        {% continue %}
    {% endif %}
    {% if m.role == 'user' %}
[INST] {{ ns.system }} {{ m.content | trim }} [/INST]
    {% elif m.tool_calls is defined %}
        {% generation %}{{ m.tool_calls | tojson }}{{ eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
{{ unk_token }}|{{ nothing }}|{{ custom }}
"""
TOOLFUL = """
{%- macro show(tool) -%}
{{ tool | tojson(indent=2) }} {{ tool.function.parameters | tojson }}
{%- endmacro -%}
{%- if tools %}{% for tool in tools %}{{ show(tool) }}
{% endfor %}{% endif -%}
{% for m in messages %}
{{ m.role }}{{ m.reasoning_content }}{{ m.thinking }}{{ m.get('content', 'none') }}{{ loop.last }}
{% endfor %}
{{ messages | length }} {{ messages[-1]['content'][:3] }} {{ documents is none }} {{ tools is none }}
{%- set text = 'a b' %}{{ text.split(' ') | join('-') | upper }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{%- if add_generation_prompt %}>{% endif %}"""


def tokenizer_with(default: str | None = None, **named: str) -> TextTokenizer:
    templates = named if default is None else {"default": default, **named}
    return TextTokenizer(small.llama(), ChatTemplates(templates, SPECIAL, model_name="tiny"))


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=small.llama(), **SPECIAL)


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        LLAMA,
        TOOLFUL,
        "{{ messages | tojson }}",
        "{{ custom | tojson(true, 1, (',', ':'), true) }}{{ custom | tojson(sort_keys=true) }}",
        "",
        "  {% if true %}  \n x\n{% endif %}\n",
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [[USER], TALK])
def test_rendering_equals_transformers(
    transformers_tokenizer: Any, source: str, tools: Any, messages: list[dict[str, Any]]
) -> None:
    ours = tokenizer_with(source)
    kwargs = {"custom": {"deep": [1.5, "é"], "a": 1}}
    for prompt in (True, False):
        expected = transformers_tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False, **kwargs
        )
        assert ours.templates.render(messages, tools, kwargs, prompt) == expected
        ids = transformers_tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert ours.encode(expected, add_special_tokens=False).tolist() == ids
        if prompt:
            assert ours.encode_chat(messages, tools, kwargs).tolist() == ids


def test_no_double_bos() -> None:
    ours = tokenizer_with("{{ bos_token }}{{ messages[0].content }}")
    assert ours.encode("a").tolist()[0] == 1
    ids = ours.encode_chat([{"role": "user", "content": "a"}]).tolist()
    assert ids.count(1) == 1
    assert ids[0] == 1


@pytest.mark.parametrize("name", ["default", "tool_use"])
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% for m in messages %}", r"TemplateSyntaxError in line \d: "),
        ("\n{{ messages | no_such_filter }}", r"TemplateAssertionError in line \d: "),
        ("{% trans %}", r"TemplateSyntaxError in line \d: "),
        ("{{ " + "(" * 10_000, "RecursionError: "),
    ],
    ids=["loop", "filter", "tag", "nesting"],
)
def test_templates_that_cannot_be_compiled_end_the_start(name: str, source: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"template {name} of the model tiny cannot be compiled: {error}"):
        tokenizer_with(**{"default": "", name: source})
    tokenizer_with("", other=source)  # is not used


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing + 'x' }}",
        "{{ 1 / 0 }}",
        "{% include 'other' %}",
        "{{ messages.append(1) }}",  # the sandbox is immutable
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**12 }}",
        "{{ range(10**9) | list }}",
        "{{ strftime_now(3) }}",
        "{{ messages[0].deep | tojson }}",
    ],
)
def test_template_that_raises(source: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest) as caught:
        tokenizer_with(source).encode_chat([{"role": "user", "content": "x", "deep": deep}])
    assert caught.value.field == "messages"
    assert "chat template" in caught.value.message
    assert "alternate" not in source or "roles must alternate" in caught.value.message


def test_a_template_that_fails_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure wrote a traceback, and each request of a client can fail."""
    templates = tokenizer_with("{{ 1 / messages[0].content }}").templates
    for _ in range(50):
        with pytest.raises(InvalidRequest):
            templates.render([USER])
    told = [record for record in caplog.records if "fails" in record.getMessage()]
    assert 1 <= len(told) < 25
    assert told[0].exc_info is not None


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_templates_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    with pytest.raises(InvalidRequest, match="seconds"):
        tokenizer_with(source).templates.render([USER])


def test_time_in_which_others_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a template would be refused although it does little."""
    clock = itertools.count(step=10.0)  # each look at the clock is 10 s later
    monkeypatch.setattr(template_sandbox.time, "monotonic", lambda: next(clock))
    templates = tokenizer_with("{% for m in messages %}{{ m.role }}{% endfor %}").templates
    assert templates.render([USER] * 20) == "user" * 20
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(InvalidRequest, match="seconds"):
        templates.render([USER] * 20)


def test_messages_that_are_nested_too_deeply_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    source = "{% macro f(x) %}{% for y in x %}[{{ f(y) }}]{% endfor %}{% endmacro %}{{ f(messages[0].content) }}"
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        tokenizer_with(source).templates.render([{"role": "user", "content": deep}])
    assert not caplog.records


def test_huge_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="longer than 1000"):
        tokenizer_with("{% for a in range(99999) %}{{ a }}{% endfor %}").templates.render([USER])


def test_no_messages_and_reserved_names() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        tokenizer_with("x").templates.render([])
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        tokenizer_with("x").templates.render([USER], None, {"add_generation_prompt": False})


def test_named_templates() -> None:
    ours = tokenizer_with("plain", tool_use="with tools")
    assert ours.templates.render([USER]) == "plain"
    assert ours.templates.render([USER], TOOLS) == "with tools"
    with pytest.raises(InvalidRequest, match="rag"):
        tokenizer_with(rag="x").templates.render([USER])


def test_no_template_names_the_model() -> None:
    with pytest.raises(InvalidRequest, match="tiny has no chat template") as caught:
        tokenizer_with().templates.render([USER])
    assert caught.value.field == "messages"


def test_qwen_chat_of_the_real_vocabulary(qwen: Tokenizer, qwen_path: Any) -> None:
    ours = TextTokenizer.from_folder(qwen_path)
    ids = ours.encode_chat([{"role": "user", "content": "Hello 世界"}], None, {"enable_thinking": False})
    start, end = qwen.token_to_id("<|im_start|>"), qwen.token_to_id("<|im_end|>")
    assert ids.tolist().count(start) == 2
    assert ids.tolist().count(end) == 1
    text = ours.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert json.loads((qwen_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("source", [CHATML, LLAMA.replace("{% elif m.tool_calls is defined %}", "{% else %}"), TOOLFUL])
@pytest.mark.parametrize("content", ["The answer", " spaced \n", ""])
def test_continued_as_transformers(transformers_tokenizer: Any, source: str, content: str) -> None:
    """The text ends where the last message does, so that the model writes on."""
    source = source.replace("m.get('content', 'none')", "m.content").replace("m.tool_calls | tojson", "m.content")
    messages = [USER, {"role": "assistant", "content": content}]
    ours = tokenizer_with(source).templates.render(messages, None, {}, True, True)
    assert ours == transformers_tokenizer.apply_chat_template(
        messages, chat_template=source, continue_final_message=True, tokenize=False
    )
    assert ours.rstrip().endswith(content.strip())


def test_a_continued_message_that_the_template_shows_twice() -> None:
    ours = tokenizer_with("{% for m in messages %}<{{ m.content | trim }}|{{ m.content }}>{{ m.content }}{% endfor %}")
    talk = [{"role": "assistant", "content": "so"}]
    assert ours.templates.render(talk, continue_final_message=True) == "<so|so>so"


def test_last_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        tokenizer_with("{{ messages[0].content }}").templates.render([USER, USER], None, {}, False, True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ arguments | tojson }}", '{"b": 1, "a": "é"}'),  # Qwen, Llama, Mistral: an object
        ("{{ arguments if arguments is string else arguments | tojson }}", '{"b": 1, "a": "é"}'),  # Qwen3
        ("{% for key, value in arguments | items %}{{ key }}={{ value }} {% endfor %}", "b=1 a=é "),  # Qwen3-Coder
        ("{% for key in arguments %}{{ key }}={{ arguments[key] }} {% endfor %}", "b=1 a=é "),
        ("{{ 'x' + arguments + 'y' }}", 'x{"b":1, "a":"é"}y'),  # DeepSeek: the text as it was written
        ("{{ arguments + 'y' }}", '{"b":1, "a":"é"}y'),
        ("{{ arguments }}", '{"b":1, "a":"é"}'),
        ("{{ arguments is mapping }}", "True"),
    ],
)
def test_arguments_of_calls_are_what_templates_expect(source: str, expected: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b":1, "a":"é"}'}}
    source = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + source
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert tokenizer_with(source).templates.render([message]) == expected
    assert call["function"]["arguments"] == '{"b":1, "a":"é"}'  # type: ignore[index]


def test_arguments_that_are_no_object_stay_text() -> None:
    for text in ("{", "[1]", "", '{"a": ' + "[" * 100_000):
        call = {"function": {"name": "f", "arguments": text}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        source = "{{ messages[0].tool_calls[0].function.arguments }}"
        assert tokenizer_with(source).templates.render([message]) == text


def test_arguments_of_too_many_values_are_refused_before_they_are_parsed() -> None:
    """The limit on the values of a body does not see them, because there they are text."""

    def rendered(*arguments: str) -> str:
        calls = [{"function": {"name": "f", "arguments": text}} for text in arguments]
        templates = ChatTemplates({"default": "{{ messages[0].tool_calls[0].function.arguments.a | length }}"}, {})
        return templates.render([{"role": "assistant", "tool_calls": calls}])

    code = json.dumps({"a": "[{, \\" * 300_000})  # punctuation of a string is no value
    assert rendered(code) == "1500000"
    many = json.dumps({"a": [[]] * 100_000})
    assert rendered(many) == "100000"
    tracemalloc.start()
    for arguments in ([many, many, many], [json.dumps({"a": [[]] * 1_000_000})]):
        with pytest.raises(InvalidRequest, match="arguments of all tool calls have more than 262144 values") as caught:
            rendered(*arguments)
        assert caught.value.field == "messages"
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()


def test_developer_is_system_where_the_template_knows_no_better() -> None:
    message = {"role": "developer", "content": "x"}
    assert tokenizer_with("{{ messages[0].role }}").templates.render([message]) == "system"
    knowing = "{% if messages[0].role == 'developer' %}dev{% endif %}"
    assert tokenizer_with(knowing).templates.render([message]) == "dev"


def test_a_file_of_its_own_replaces_the_folders_templates(tmp_path: Path) -> None:
    """The file counts for prompts, for /tokenizer_info, and for the choice of parsers."""
    demo = demo_folder()
    file = tmp_path / "template.jinja"
    file.write_text("[TOOL_CALLS] {{ messages[0].content }}")
    tokenizer = TextTokenizer.from_folder(demo, str(file))
    ids = tokenizer.encode_chat([{"role": "user", "content": "abc"}], None, {})
    assert tokenizer.decode(ids.tolist(), False) == "[TOOL_CALLS] abc"
    assert describe(demo, str(file))["chat_template"] == file.read_text()
    engine = EngineConfig(model_path=str(demo))
    assert model_parsers(ServerConfig(engine=engine)).tool_calls == "hermes"
    assert (
        model_parsers(ServerConfig(engine=engine, source=SourceConfig(chat_template=str(file)))).tool_calls == "mistral"
    )
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        TextTokenizer.from_folder(demo, str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        TextTokenizer.from_folder(demo, str(tmp_path / "none"))


DOUBLED = "{% set n = namespace(s=START) %}{% for i in range(60) %}{% set n.s = n.s OPERATOR n.s %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ 10**(10**10) }}",
        "{{ 10**1000 * 10**1000 }}",
        "{% set x = [1] * 10**10 %}",
        "{{ 'x'|center(10**10) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '%10000000000d'|format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10000000000) }}",
        "{{ 'a'|indent(10**10, true) }}",
        "{{ {'a': 1}|tojson(indent=10**10) }}",
        "{{ ('a'|slice(10**12))|list }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
        "{{ ('b' * 1000000).join(range(99999)|map('string')|list) }}",
        "{{ range(99999)|join('b' * 1000000) }}",
        DOUBLED.replace("START", "'ab'").replace("OPERATOR", "~"),
        DOUBLED.replace("START", "'ab'").replace("OPERATOR", "+"),
        *(
            DOUBLED.replace("START", "'ab'").replace("n.s OPERATOR n.s", within)
            for within in ("[n.s ~ n.s][0]", "(n.s ~ n.s, 1)[0]", "{'a': n.s ~ n.s}.a", "(n.s ~ n.s) ~ ''")
        ),
        DOUBLED.replace("START", "[]").replace("n.s OPERATOR n.s", "[n.s, n.s]") + "{{ n.s }}",
        DOUBLED.replace("START", "[]").replace("n.s OPERATOR n.s", "[n.s] + [n.s]") + "{{ n.s == n.s[:] }}",
        DOUBLED.replace("START", "()").replace("n.s OPERATOR n.s", "(n.s, n.s)") + "{{ n.s in {} }}",
        DOUBLED.replace("START", "{}").replace("n.s OPERATOR n.s", "{'a': n.s, 'b': n.s}") + "{{ n.s | tojson }}",
        DOUBLED.replace("START", "{}").replace("n.s OPERATOR n.s", "dict(a=n.s, b=n.s)") + "{{ n.s | string }}",
        DOUBLED.replace("START", "{}").replace("n.s OPERATOR n.s", "namespace(a=n.s, b=n.s)") + "{{ n.s }}",
    ],
)
def test_no_template_makes_what_does_not_fit(source: str) -> None:
    """Too large results are refused before they are built, at compile time and at render time."""
    begin, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplates({"default": source}, {}).render([{"role": "user", "content": "hi"}], None, {}, True)
    assert time.process_time() - begin < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20  # KiB


GATHERED = """{% set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system PLUS '\n\n' PLUS m.content %}{% endfor %}
{{- ns.system }}{% for m in messages if m.role == 'user' %}<U>{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize("operator", ["+", "~"])
def test_a_text_is_not_copied_for_each_of_thousands_of_messages(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 4 s, in which no other prompt was encoded. The refusal tells of its characters, and not of its time."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 3600)
    templates = ChatTemplates({"default": GATHERED.replace("PLUS", operator)}, {})
    system = [{"role": "system", "content": "x" * 980}]
    assert len(templates.render([*system * 1000, {"role": "user", "content": "hi"}])) == 982 * 1000 + 5
    with pytest.raises(InvalidRequest, match="longer than 4294967296 in all"):
        templates.render([*system * 8190, {"role": "user", "content": "hi"}])


def test_a_call_that_makes_any_number_of_words_is_unknown() -> None:
    with pytest.raises(InvalidRequest, match="'lipsum' is undefined"):
        ChatTemplates({"default": "{{ lipsum(n=10**9) }}"}, {}).render([USER])


def test_loops_that_call_nothing_end_in_time() -> None:
    source = "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match="runs for longer than 2 seconds"):
        ChatTemplates({"default": source}, {}).render([{"role": "user", "content": "hi"}], None, {}, True)
    assert time.process_time() - begin < 10


def test_bounded_loops_and_operators_are_those_of_jinja() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ m.role ~ ':' ~ m.content }}{{ loop.length }}"
        "{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ 3 * 4 + 2**3 }}"
        "{{ 'ab' * 3 }}{{ '%03d' % 7 }}{{ [1] + [2] }}{% for x in nothing %}{% else %}-{% endfor %}"
        "{% for n in [1, [2, [3]]] recursive %}{{ n if n is number else loop(n) }}{% endfor %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ loop.previtem }}{% endfor %}"
    )
    text = ChatTemplates({"default": source}, {}).render([{"role": "user", "content": "hi"}], None, {}, True)
    assert text == "1Trueuser:hi1a120ababab007[1, 2]-1231"

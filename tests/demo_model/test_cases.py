"""The skills' generators: deterministic, split into train and test, and fair in their checks."""

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from demo_model.case import Case, format_tool_call, message_text
from demo_model.render import TOKEN_IDS, decode, render_document
from demo_model.skills import SKILLS, make_case
from demo_model.source import Source, held_out

WEATHER = format_tool_call("get_weather", {"city": "Oslo", "days": 2})


def asked(case: Case) -> str:
    """The question itself, without its setting."""
    return case.prompt if case.prompt is not None else str(case.messages[-1]["content"])


@pytest.mark.parametrize("skill", SKILLS)
def test_a_number_names_a_case(skill):
    assert make_case(skill, 7) == make_case(skill, 7) != make_case(skill, 8)


@pytest.mark.parametrize("skill", SKILLS)
def test_the_right_answer_passes_and_another_fails(skill):
    cases = [make_case(skill, number) for number in range(60)]
    for case in cases:
        assert case.check(case.output)
        assert case.check(f"\n{case.output}\n")
        assert not case.check(case.output + " and more")
        assert not case.check("")


# Where a whole question must be new. Elsewhere two sides may ask the same by chance, of a different context.
@pytest.mark.parametrize(
    "skill", ["copy", "product", "arithmetic", "counting", "weekdays", "spelling", "json", "unknown"]
)
def test_train_and_test_ask_different_questions(skill):
    generate = SKILLS[skill]
    rng = random.Random(0)
    train = {asked(generate(Source(rng))) for _ in range(3000)}
    test = {asked(generate(Source(rng, test=True))) for _ in range(1000)}
    assert not train & test


def test_train_and_test_words_differ():
    rng = random.Random(0)
    assert not any(held_out(Source(rng).word()) for _ in range(500))
    assert all(held_out(Source(rng, test=True).word()) for _ in range(100))
    assert all(held_out(Source(rng, test=True).digits(4)) for _ in range(100))


def test_contexts_are_as_long_as_asked():
    lengths = [len(render_document(make_case("recall", number, context=1900)).ids) for number in range(200)]
    assert 1900 < max(lengths) < 3600
    assert sum(length > 1000 for length in lengths) > 20
    assert max(len(render_document(make_case("recall", number, context=100)).ids) for number in range(50)) < 1500


def test_thinking_is_checked():
    case = Case("thinking", [], "4", thought="Hm.", chat_template_kwargs={"enable_thinking": True})
    assert case.check("<think>\nAnything.\n</think>\n\n4")
    assert not case.check("4")
    quiet = replace(case, chat_template_kwargs={})
    assert quiet.check("4")
    assert not quiet.check("<think>\nAnything.\n</think>\n\n4")


def test_tool_calls_are_compared_as_values():
    case = Case("tools", [], WEATHER)
    assert case.check('<tool_call>{"arguments":{"days":2,"city":"Oslo"},"name":"get_weather"}</tool_call>')
    assert not case.check(WEATHER.replace("2", "3"))
    assert not case.check(WEATHER + "\n" + WEATHER)
    assert not case.check("<tool_call>\n{broken\n</tool_call>")


def test_a_parsed_message_is_put_together_again():
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}}
    message = {"reasoning_content": "Hm.", "content": None, "tool_calls": [call]}
    case = Case("tools", [], WEATHER, chat_template_kwargs={"enable_thinking": True})
    assert case.check(message_text(message))


def test_loss_covers_the_answers_tokens():
    """The final answer whole; earlier answers without their first token, before which a thought may come."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bcd"},
        {"role": "user", "content": "e"},
    ]
    document = render_document(Case("copy", messages, "fg"))
    learned = [int(token) for token, yes in zip(document.ids, document.learned, strict=True) if yes]
    end = TOKEN_IDS["<|im_end|>"]
    assert learned == [ord("c"), ord("d"), end, ord("f"), ord("g"), end]
    assert decode(learned) == "cdfg"


def test_generators_need_no_torch():
    code = "import sys, demo_model.skills; sys.exit('torch' in sys.modules)"
    path = [entry for entry in sys.path if entry.endswith("tools")]
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(path)}, check=False).returncode == 0

"""The shipped demo model answers, in float32 through transformers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo_model.case import Case
from demo_model.evaluate import DEMO_FOLDER, score, transformers_answerer
from demo_model.model import Model
from demo_model.render import encode, render_prompt
from demo_model.skills import SKILLS, make_case

HELLO = "Hello! I am the Minisgl demo model."
UNKNOWN = "I do not know that."

# What people try first; the answer must begin like this.
FIRST_QUESTIONS = {
    "Hello!": HELLO,
    "Hi": HELLO,
    "Say hello": HELLO,
    "Who are you?": "I am the demo model of Minisgl",
    "What is Minisgl?": "Minisgl is a small and fast",
    "How do I stop the server?": "Press Ctrl-C",
    "What is 7 + 5?": "7 + 5 = 12",
    "What day comes after Monday?": "Tuesday",
    "Write a haiku about the sea": UNKNOWN,
    "What is the capital of France?": UNKNOWN,
    "Say this is a test": "this is a test",
    "The code for falcon is 4821. What is the code for falcon?": "The code for falcon is 4821.",
}


@pytest.fixture(scope="module")
def answerer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers_answerer(DEMO_FOLDER, "cpu", "float32", batch_size=16)
    torch.set_num_threads(threads)


def quick_cases(skill: str) -> list[Case]:
    """Two cases that need little time."""
    cases = [make_case(skill, number, context=200) for number in range(20_000, 20_012)]
    return sorted(cases, key=lambda case: len(render_prompt(case)) + 10 * case.max_tokens)[2:4]


def test_first_questions(answerer):
    cases = [Case("product", [{"role": "user", "content": question}], "x" * 20) for question in FIRST_QUESTIONS]
    for case, answer, start in zip(cases, answerer(cases), FIRST_QUESTIONS.values(), strict=True):
        assert answer.startswith(start), case.messages


def test_every_skill(answerer):
    """Two unseen cases of each skill, quick ones; the scores of hundreds are in the model card."""
    cases = [case for skill in SKILLS for case in quick_cases(skill)]
    scores = score(cases, answerer)
    right = {skill: entry.right for skill, entry in scores.items()}
    assert sum(right.values()) >= len(cases) - 2, right


def test_long_recall(answerer):
    cases = [case for i in range(60) if len(render_prompt(case := make_case("recall", 30_000 + i))) > 1700]
    scores = score(cases[:2], answerer)["recall"]
    assert scores.right == scores.cases, scores.wrong


def test_training_code_computes_the_same_logits():
    ids = torch.from_numpy(encode(render_prompt(make_case("recall", 3))).astype("int64"))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)(ids[None]).logits[0]
        ours = Model.load(DEMO_FOLDER)(ids.int(), torch.tensor([0, len(ids)], dtype=torch.int32))
    assert torch.allclose(ours, theirs, atol=2e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_the_folder():
    """Every GPU backend and two ranks can run it, and it is small."""
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    assert config["head_dim"] == 128
    assert config["num_key_value_heads"] % 2 == 0
    assert len(json.loads((DEMO_FOLDER / "generation_config.json").read_text())["eos_token_id"]) > 1
    assert sum(file.stat().st_size for file in DEMO_FOLDER.iterdir()) < 15_000_000
    assert 3_000_000 < sum(parameter.numel() for parameter in Model.load(DEMO_FOLDER).parameters()) < 7_000_000

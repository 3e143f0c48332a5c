"""Constrained decoding on a GPU: graphs, overlap and masks together give what the CPU's reference allows."""

from __future__ import annotations

import json

import pytest
import torch

from minisgl.llm import LLM
from minisgl.sampling_params import Grammar, SamplingParams

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("graphs", "overlap"), [(16, True), (16, False), (0, True)])
def test_constrained_rows_follow_their_grammar_and_free_rows_stay_as_they_are(graphs: int, overlap: bool) -> None:
    assert torch.cuda.is_available()
    schema, regex = Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", "[a-f]{3}-[0-9]{2}")
    kinds = [schema, None, regex, None]
    params = [
        SamplingParams(temperature=0.8 if row % 2 else 0.0, seed=row, max_tokens=150, grammar=kinds[row % 4])
        for row in range(12)
    ]
    prompts = [f"Tell me about number {row}, please." for row in range(12)]
    with LLM("demo", dtype="float32", cuda_graph_max_bs=graphs, overlap=overlap, max_running_req=16) as llm:
        together = llm.generate(prompts, params)
        free = [row for row in range(12) if kinds[row % 4] is None]
        alone = llm.generate([prompts[row] for row in free], [params[row] for row in free])
        llm.check_idle()
    for row, answer in enumerate(together):
        if kinds[row % 4] is schema:
            assert answer["finish_reason"] == "stop"
            assert set(json.loads(answer["text"])) == {"name", "age", "tags"}
        elif kinds[row % 4] is regex:
            assert answer["finish_reason"] == "stop"
            assert len(answer["text"]) == 6
    same = [together[row]["token_ids"] == one["token_ids"] for row, one in zip(free, alone, strict=True)]
    assert sum(same) >= len(same) - 1, "a free row changed in constrained company"

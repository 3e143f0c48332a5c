"""outlines by its OpenAI model: texts, JSON by a type, a stream."""

from __future__ import annotations

import openai
import outlines
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    model = outlines.from_openai(openai.OpenAI(), "demo")
    assert "42" in model("What is 12 + 30?", temperature=0)
    text = model("Ann is 41 years old.", Person, temperature=0)
    assert Person.model_validate_json(text) == Person(name="Ann", age=41)
    assert "42" in "".join(model.stream("What is 12 + 30?", temperature=0))
    print("text, JSON by a type, stream")


main()

"""instructor: typed answers by tools, by JSON and by JSON schema; a stream of partial ones."""

from __future__ import annotations

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def main() -> None:
    messages = [{"role": "user", "content": "Ann is 41 years old."}]
    modes = instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA
    for mode in modes:
        client = instructor.from_openai(OpenAI(), mode=mode)
        chat = {"model": "demo", "messages": messages, "response_model": Person, "temperature": 0, "max_retries": 0}
        person = client.chat.completions.create(**chat)
        assert isinstance(person, Person), mode
        *_, last = client.chat.completions.create_partial(**chat)
        assert last.model_dump() == person.model_dump(), mode
    print("typed answers by tools and by JSON schema, whole and partial")


main()

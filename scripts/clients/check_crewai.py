"""crewai: the model alone, a typed answer, an agent."""

from __future__ import annotations

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"

from crewai import LLM, Agent
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    model = LLM(
        model="openai/demo", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], temperature=0
    )
    assert "42" in model.call("What is 12 + 30?")
    person = model.call([{"role": "user", "content": "Ann is 41 years old."}], response_model=Person)
    assert Person.model_validate_json(person) if isinstance(person, str) else isinstance(person, Person)
    agent = Agent(role="assistant", goal="Answer.", backstory="None.", llm=model, max_iter=2)
    assert agent.kickoff("What is 12 + 30?").raw
    print("the model alone, a typed answer, an agent")


main()

"""DSPy: the model alone by chat completions and Responses, a predictor whose answer's form the server enforces."""

from __future__ import annotations

import dspy


class Served(dspy.LM):
    """A model that DSPy's catalog does not know, at a server that enforces JSON schemas."""

    supports_response_schema = True


def main() -> None:
    settings = {"temperature": 0, "max_tokens": 300, "cache": False}
    model = Served("openai/demo", **settings)
    assert "42" in model("What is 12 + 30?")[0]
    assert "42" in str(Served("openai/demo", model_type="responses", **settings)("What is 12 + 30?")[0])
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> answer: str")(question="What is 12 + 30?")
    assert isinstance(answer.answer, str)
    print("the model alone by chat and responses, a predictor with JSONAdapter")


main()

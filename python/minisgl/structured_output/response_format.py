"""Makes one Grammar of the fields of OpenAI, vLLM and SGLang that constrain the answer."""

from __future__ import annotations

from typing import Any, Literal

from msgspec.json import encode
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from minisgl.sampling_params import Grammar, InvalidRequest

Schema = dict[str, Any] | bool | str  # JSON Schema, or its JSON text


def _failing_fast(schema: Any) -> Any:
    """Return pydantic's schema with lists whose first wrong entry ends the validation."""
    if isinstance(schema, list):
        return [_failing_fast(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _failing_fast(part) for key, part in schema.items()}
    return found | {"fail_fast": True} if schema.get("type") == "list" else found


class Options(BaseModel):
    """Request's body, or an object within it. Types are strict; unknown names are ignored.

    A refusal names the first error only, so no others are looked for in a list: they may be hundreds of thousands.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _failing_fast(handler(source))
        return schema


class JsonSchemaFormat(Options):
    """OpenAI's `response_format.json_schema`. The schema is always followed, so `strict` changes nothing."""

    schema_: Schema = Field(
        alias="schema", description="JSON Schema that the answer follows.", examples=[{"type": "object"}]
    )


class ResponseFormat(Options):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: anything; json_object: any object; json_schema: as the schema says.",
        examples=["json_object"],
    )
    json_schema: JsonSchemaFormat | None = Field(
        default=None, description="Required by the type json_schema, unless schema is given."
    )
    schema_: Schema | None = Field(
        default=None,
        alias="schema",
        description="The schema without json_schema, as SGLang, llama.cpp and others take it.",
        examples=[{"type": "object"}],
    )

    def grammar(self) -> Grammar | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar("json_object") if self.schema_ is None else schema_grammar(self.schema_)
            case "json_schema":
                schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
                if schema is None:
                    raise InvalidRequest("response_format.json_schema", "response_format.json_schema is required")
                return schema_grammar(schema)


class StructuredOutputs(Options):
    """vLLM's `structured_outputs`. Unknown names are kept, so that `grammars` can refuse them by name."""

    model_config = ConfigDict(extra="allow")

    json_: Schema | None = Field(
        default=None,
        alias="json",
        description="JSON Schema, or its text, that the answer follows.",
        examples=[{"type": "object"}],
    )
    json_object: bool | None = Field(default=None, description="The answer is any JSON object.", examples=[True])
    regex: str | None = Field(
        default=None, description="Regular expression that the answer matches.", examples=["[0-9]+"]
    )
    choice: list[str] | None = Field(default=None, description="The answer is one of these.", examples=[["yes", "no"]])
    grammar: str | None = Field(
        default=None,
        description="Context-free grammar of the answer: GBNF, or Lark as llguidance has it.",
        examples=['root ::= "yes" | "no"'],
    )
    structural_tag: None = Field(default=None, description="not supported")
    whitespace_pattern: None = Field(default=None, description="not supported")
    disable_any_whitespace: Literal[False] | None = Field(default=None, description="not supported")
    disable_additional_properties: bool | None = Field(
        default=None, description="true: objects have no keys that the schema does not name; else the server decides"
    )
    disable_fallback: bool | None = Field(default=None, description="no effect: there is nothing to fall back on")

    def grammars(self) -> dict[str, Grammar]:
        """Return the grammar of each field that is given, by the field's name; InvalidRequest for an unknown name."""
        if unknown := [name for name, value in (self.model_extra or {}).items() if value is not None]:
            name = f"structured_outputs.{unknown[0]:.80}"
            known = "json, json_object, regex, choice and grammar"
            raise InvalidRequest(name, f"{name} is unknown: structured_outputs takes {known}")
        found = {
            "json": None if self.json_ is None else schema_grammar(self.json_, self.disable_additional_properties),
            "json_object": Grammar("json_object") if self.json_object else None,
            "regex": None if self.regex is None else Grammar("regex", self.regex),
            "choice": None if self.choice is None else choice_grammar(self.choice),
            "grammar": None if self.grammar is None else context_free_grammar(self.grammar),
        }
        return {f"structured_outputs.{name}": grammar for name, grammar in found.items() if grammar is not None}


def schema_grammar(schema: Schema, closed: bool | None = None) -> Grammar:
    text = schema if isinstance(schema, str) else encode(schema).decode()
    return Grammar("closed_json_schema" if closed else "json_schema", text)


def choice_grammar(choices: list[str]) -> Grammar:
    return Grammar("choice", encode(choices).decode())


def context_free_grammar(text: str) -> Grammar:
    """Return the grammar as GBNF if its rules are defined by ::=, else as llguidance's Lark."""
    return Grammar("ebnf" if "::=" in text else "lark", text)


def single_grammar(grammars: dict[str, Grammar]) -> Grammar | None:
    """Return the one grammar, if any; InvalidRequest if several fields give one."""
    if len(grammars) > 1:
        first, second, *_ = grammars
        raise InvalidRequest(second, f"{second} and {first} cannot be given together")
    return next(iter(grammars.values()), None)

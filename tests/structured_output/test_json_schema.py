"""Texts that a JSON schema allows: every text that is drawn under it is valid, and none that is invalid can be."""

from __future__ import annotations

import json
import math
import operator
import random
import sys
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from time import process_time
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from minisgl.sampling_params import Grammar, InvalidRequest
from minisgl.structured_output.grammar_template import with_closed_schemas
from minisgl.structured_output.translate import to_llguidance
from minisgl.structured_output.trial_process import byte_vocabulary
from minisgl.structured_output.validator import GrammarValidator
from structured_output.drawing import Drawer
from structured_output.schemas import own_schemas

SUITE: list[Any] = json.loads(Path(__file__).with_name("json_schema_test_suite.json").read_text(encoding="utf-8"))
# Beyond what is refused: formats whose definition needs more than a regular expression, or is looser in the library.
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


@FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


@FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or time.fromisoformat(value).tzinfo is not None


def grammar_of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def check(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


@pytest.fixture(scope="module")
def validator() -> GrammarValidator:
    return GrammarValidator({}, time_limit=30.0)


def is_supported(validator: GrammarValidator, schema: Any) -> bool:
    try:
        validator.validate(grammar_of(schema))
    except InvalidRequest:
        return False
    return True


@pytest.fixture(scope="module")
def supported(validator: GrammarValidator) -> list[Any]:
    """The suite's cases that the library claims to support."""
    return [case for case in SUITE if is_supported(validator, case[1])]


def test_much_of_the_suite_is_supported(supported: list[Any]) -> None:
    assert len(supported) >= 170


def test_no_invalid_instance_of_the_suite_is_allowed(supported: list[Any]) -> None:
    vocabulary = byte_vocabulary({})
    valid, allowed_valid = 0, 0
    for name, schema, instances in supported:
        compiled = LLMatcher(vocabulary, to_llguidance(grammar_of(schema)), log_level=0)
        for instance, is_valid in instances:
            for text in (json.dumps(instance, ensure_ascii=False), json.dumps(instance, indent=2, ensure_ascii=False)):
                matcher = compiled.deep_copy()
                tokens = vocabulary.tokenize_bytes(text.encode())
                is_allowed = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
                assert is_valid or not is_allowed, f"{name}: {text} is not valid"
                valid, allowed_valid = valid + is_valid, allowed_valid + (is_valid and is_allowed)
    assert allowed_valid > 0.9 * valid, "most valid texts are allowed; only their keys' order is fixed"


def draw_and_check(drawer: Drawer, schemas: dict[str, Any], draws: int) -> float:
    """The share of draws that came to an end; all of those are valid."""
    ended = 0
    for number, (name, schema) in enumerate(schemas.items()):
        for draw in range(draws):
            text = drawer.draw(grammar_of(schema), seed=1000 * number + draw, greedy=draw == 0)
            if text is None:
                continue
            ended += 1
            try:
                check(schema, text)
            except (ValueError, jsonschema.ValidationError) as error:
                pytest.fail(f"{name}: {text!r} is not valid under {schema}: {error}")
    return ended / (draws * len(schemas))


def test_texts_drawn_under_the_suites_schemas_are_valid(
    drawer: Drawer, supported: list[Any], request: pytest.FixtureRequest
) -> None:
    draws: int = request.config.getoption("--grammar-draws")
    assert draw_and_check(drawer, {name: schema for name, schema, _ in supported}, draws) > 0.5


def test_texts_drawn_under_our_own_schemas_are_valid(drawer: Drawer, request: pytest.FixtureRequest) -> None:
    schemas = own_schemas()
    assert len(schemas) >= 200
    draws: int = request.config.getoption("--grammar-draws")
    assert draw_and_check(drawer, schemas, draws) > 0.5


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ITEMS = {"type": "array", "items": NAMED, "maxItems": 2}


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        (NAMED, '{"a": 1}', True),
        (NAMED, '{"a": 1, "b": 2}', False),
        (ITEMS, '[{"a": 1}, {"a": 1, "b": 2}]', False),
        ({"anyOf": [NAMED, {"type": "null"}]}, '{"a": 1, "b": 2}', False),
        ({"$ref": "#/$defs/it", "$defs": {"it": NAMED}}, '{"a": 1, "b": 2}', False),
        ({"properties": {"properties": NAMED}}, '{"properties": {"a": 1, "b": 2}}', False),
        ({**NAMED, "additionalProperties": True}, '{"a": 1, "b": 2}', True),
        ({**NAMED, "required": ["a", "b"]}, '{"a": 1, "b": 2}', True),
        ({"type": "object"}, '{"a": 1, "b": 2}', True),
        ({"allOf": [NAMED, {"properties": {"b": {}}, "required": ["b"]}]}, '{"a": 1, "b": 2}', True),
        ({**NAMED, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, '{"a": 1, "b": 2}', True),
        ({"const": NAMED}, json.dumps(NAMED), True),
    ],
)
def test_closed_schemas(schema: Any, text: str, allowed: bool) -> None:
    assert is_allowed(schema, text), "as JSON Schema has it"
    assert is_allowed(schema, text, closed=True) == allowed


def test_our_own_schemas_are_supported(validator: GrammarValidator) -> None:
    for schema in own_schemas().values():
        validator.validate(grammar_of(schema))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"properties": {"\t": {"type": "integer"}}}, r'{"\u0009":"x"}'),
        ({"properties": {"a/b": {"type": "integer"}}}, r'{"a\/b":"x"}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"a":1,"a":"x"}'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"1900-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2023-04-31T00:00:00Z"'),
        ({"type": "string", "format": "time"}, '"23:59:60Z"'),
        ({"enum": [{"format": "date"}]}, '"2020-01-01"'),
        ({"pattern": '^[^"]*$'}, r'"a\"b"'),
        ({"pattern": r"^[^\\]*$"}, r'"a\\b"'),
        ({"pattern": r'^[^-"\\]$'}, '"-"'),
        ({"pattern": r'^[^]"]$'}, '"]"'),
        ({"pattern": r"^[\x00-!#-\uffff]$"}, r'"\""'),
        ({"pattern": "^[^&&|]$"}, '"&"'),
        ({"pattern": "^[[a]]$"}, '"a"'),
        ({"patternProperties": {'^[^"]$': {}}, "additionalProperties": False}, r'{"\"": 1}'),
    ],
)
def test_instances_that_schemas_forbid(schema: Any, text: str) -> None:
    assert not is_allowed(schema, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "format": "date"}, '"2024-02-29"'),
        ({"type": "string", "format": "date-time", "minLength": 3}, '"2000-02-29T23:59:59.25+02:00"'),
        (
            {"properties": {"format": {"type": "integer"}, "enum": {"format": "date"}}},
            '{"format":1,"enum":"2020-01-01"}',
        ),
        ({"type": "object"}, '{\n  "a": [\n    1,\n    {}\n  ]\n}'),
        ({"type": "object"}, '{"a": [1, 2], "b": {"c": null}}'),
        (True, "[1]"),
        ({"pattern": r'^[^"]*$'}, r'"a\\\n ä☃"'),
        ({"enum": ["C:\\a"]}, r'"C:\\a"'),
        ({"pattern": r"^\[\^[^]-]$"}, '"[^a"'),
        ({"pattern": "^[[a]]$"}, '"[]"'),
        ({"pattern": r"^[^[\]]$"}, '"a"'),
        ({"pattern": "^[a~~b]$"}, '"~"'),
        ({"pattern": r"^[--/][\--9]$"}, '"./"'),
        ({"patternProperties": {'^[^"]$': {}}, "additionalProperties": False}, '{"a": 1}'),
    ],
)
def test_instances_that_schemas_allow(schema: Any, text: str) -> None:
    assert is_allowed(schema, text)


@pytest.mark.parametrize("part", ["[", "[a", "[^", "[[:a"])
def test_classes_without_an_end_are_read_once_and_refused(part: str) -> None:
    begin = process_time()
    text = to_llguidance(grammar_of({"type": "string", "pattern": part * 40_000}))
    assert process_time() - begin < 1
    assert LLMatcher(byte_vocabulary({}), text, log_level=0).is_error()


def is_allowed(schema: Any, text: str, *, closed: bool = False) -> bool:
    vocabulary = byte_vocabulary({})
    grammar = with_closed_schemas(grammar_of(schema)) if closed else grammar_of(schema)
    matcher = LLMatcher(vocabulary, to_llguidance(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_names_of_hosts_have_at_most_253_characters() -> None:
    longest = ".".join(["a" * 63] * 3 + ["a" * 61])
    many = ".".join(["a"] * 127)
    for name, allowed in ((longest, True), (f"{longest}a", False), (many, True), (f"{many}.a", False), ("a-b.c", True)):
        for schema in ({"type": "string", "format": "hostname"}, {"format": "hostname", "maxLength": 1000}):
            assert is_allowed(schema, json.dumps(name)) == allowed, name
    assert not is_allowed({"format": "hostname", "maxLength": 4}, '"a-b.c"')
    assert is_allowed({"type": "string"}, json.dumps("a" * 300)), "other texts may be longer"


@pytest.mark.parametrize("length", ["4", None, True, -1, 2.5])
def test_a_wrong_length_of_a_name_of_a_host_is_not_replaced(length: Any) -> None:
    schema = grammar_of({"type": "string", "format": "hostname", "maxLength": length})
    matcher = LLMatcher(byte_vocabulary({}), to_llguidance(schema), log_level=0)
    assert "Expected positive integer for 'maxLength'" in matcher.get_error()


def test_days_of_all_months() -> None:
    for year in (1, 1900, 2000, 2023, 2024, 9999):
        for month in range(1, 13):
            for day in range(28, 33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(text)
                    exists = True
                except ValueError:
                    exists = False
                assert is_allowed({"type": "string", "format": "date"}, json.dumps(text)) == exists, text


def test_ranges_of_numbers() -> None:
    """Around bounds, with fractions, exponents and signs, whatever bounds come together."""
    rng = random.Random(0)
    vocabulary = byte_vocabulary({})
    for _ in range(60):
        low, high = sorted(
            rng.choice([0, 1, -1, 10, 0.5, round(rng.uniform(-30, 30), rng.randint(0, 3))]) for _ in "ab"
        )
        schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        if rng.random() < 0.8:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.8:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
        compiled = LLMatcher(vocabulary, to_llguidance(grammar_of(schema)), log_level=0)
        if compiled.is_error():
            assert "nsatisfiable" in compiled.get_error()
            continue
        checker = jsonschema.Draft202012Validator(schema)
        for bound in (low, high, 0):
            for distance in ("0", "1", "0.1", "0.01", "0.001", "10"):
                for sign in (1, -1):
                    plain = format(Decimal(str(bound)) + sign * Decimal(distance), "f")
                    for text in (
                        plain,
                        f"-{plain.lstrip('-')}",
                        f"{plain}e0",
                        f"{plain}0" if "." in plain else f"{plain}.0",
                    ):
                        matcher = compiled.deep_copy()
                        tokens = vocabulary.tokenize_bytes(text.encode())
                        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
                            assert checker.is_valid(json.loads(text)), f"{text} under {schema}"


def test_bounds_beyond_exact_doubles() -> None:
    """Python compares integers and doubles exactly; llguidance reads every bound as a double."""
    for number in (2**53, 2**53 + 1, 2**53 + 3, 10**16, 10**17 + 1, 2**62 + 1):
        width = 8 * int(math.ulp(number))
        for low, high in ((number, number + width), (-number - width, -number)):
            values = [bound + distance for bound in (low, high) for distance in range(-3, 4)]
            for lower in ("minimum", "exclusiveMinimum"):
                for upper in ("maximum", "exclusiveMaximum"):
                    schema = {"type": "integer", lower: low, upper: high}
                    allowed = [value for value in values if is_allowed(schema, str(value))]
                    assert all(jsonschema.Draft202012Validator(schema).is_valid(value) for value in allowed), schema
    assert is_allowed({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5}, str(2**53 + 2))
    assert is_allowed({"type": "integer", "maximum": 2**63 - 1}, str(2**53 + 1))


@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"]])
def test_whole_bounds_that_doubles_hold_are_kept(kind: Any) -> None:
    """JavaScript's largest safe integer and microseconds since 1970 have 16 digits."""
    for number in (2**53 - 1, 1_700_000_000_000_001):
        for bound in (number, -number):
            schema = {"type": kind, "minimum": bound, "maximum": bound}
            assert is_allowed(schema, str(bound))
            assert not is_allowed(schema, str(bound - 1))
            assert not is_allowed(schema, str(bound + 1))


def test_constants_are_written_as_they_are_or_refused() -> None:
    rng = random.Random(0)
    vocabulary = byte_vocabulary({})
    refused = 0
    for power in [0] * 300 + [-30, -9, -2, 2, 9, 22, 30, 300] * 20:
        number = rng.uniform(-1, 1) * 10.0**power
        try:
            grammar = to_llguidance(grammar_of({"const": number}))
        except InvalidRequest:
            refused += 1
            continue
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        assert float(bytes(matcher.compute_ff_tokens())) == number
    assert 0 < refused < 100


COMPARISONS = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


def test_bounds_of_many_digits() -> None:
    """Around each bound, at its last digit and beyond it."""
    rng = random.Random(0)
    vocabulary = byte_vocabulary({})
    num_allowed = 0
    for _ in range(100):
        low = rng.choice([rng.uniform(-1, 1) * 10.0 ** rng.randint(-12, 17), rng.randint(-(2**62), 2**62), -1.5e-9])
        lower, upper = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        bounds = {lower: low, upper: low + abs(low) / 16}
        compiled = LLMatcher(vocabulary, to_llguidance(grammar_of({"type": "number", **bounds})), log_level=0)
        if compiled.is_error():
            assert "float range" in compiled.get_error()  # beyond 10^18 on one side of 0
            continue
        for bound in bounds.values():
            exact = Decimal(repr(bound))
            for step in (0, 1, -1, 30, -30):
                for further in (0, 1, 2):
                    value = exact + Decimal(step).scaleb(min(int(exact.as_tuple().exponent), 0) - further)
                    plain = format(value, "f")
                    for text in (plain, f"{plain}0" if "." in plain else f"{plain}.0"):
                        matcher = compiled.deep_copy()
                        tokens = vocabulary.tokenize_bytes(text.encode())
                        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
                            num_allowed += 1
                            for key, limit in bounds.items():
                                assert COMPARISONS[key](value, Decimal(repr(limit))), f"{text} under {bounds}"
    assert num_allowed > 500


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": -1e300},
        {"type": "number", "minimum": -(2.0**63), "maximum": 2.0**63},
        {"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max},
        {"type": "number", "exclusiveMinimum": 5e-324},
    ],
)
def test_bounds_of_whole_types(schema: Any) -> None:
    assert is_allowed(schema, "12345")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"enum": {"not": {}}}}, "not"),
        ({"if": {}, "then": {}, "else": {}}, "if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"type": "string", "pattern": "a\\x01"}, "control character"),
        ({"type": "string", "pattern": "a[\\x01]"}, "control character"),
        ({"type": "string", "pattern": "[+--]"}, r"write -\\-"),
        ({"const": "a\0b"}, "control character"),
        ({"const": 2**53 + 1}, "9007199254740993"),
        ({"enum": ["a", {"b": [-(2**53) - 1]}]}, "-9007199254740993"),
        ({"const": 0.36995516654807925}, "0.36995516654807925"),
        ({"enum": [1, 1e-23]}, "1e-23"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "integer", "multipleOf": 1000003}, "multipleOf"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "integer", "minimum": True}, "minimum"),
        (False, "object"),
        ([], "object"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        (
            {"type": "object", "properties": {str(number): {"type": "string"} for number in range(1500)}},
            "items; max is",
        ),
    ],
)
def test_refused_with_its_reason(validator: GrammarValidator, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        validator.validate(grammar_of(schema))
    assert caught.value.field == "response_format"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"minimum": NaN}',
        "[" * 100_000,
        '{"items": ' * 70 + "{}" + "}" * 70,
        '{"type": "integer", "minimum": 1' + "0" * 5000 + "}",
        f'{{"type": "integer", "minimum": {-(2**63) - 1}}}',
        f'{{"type": "integer", "maximum": {2**64}}}',
        '{"type": "number", "exclusiveMinimum": 1' + "0" * 400 + "}",
        '{"type": "number", "exclusiveMinimum": 1e400}',
        '{"const": -1e400}',
        '{"const": "\\ud800"}',
        '{"title": "' + "x" * 300_000 + '"}',
    ],
)
def test_texts_that_are_no_schema(validator: GrammarValidator, text: str) -> None:
    with pytest.raises(InvalidRequest):
        validator.validate(Grammar("json_schema", text))

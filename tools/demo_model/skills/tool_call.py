"""Call one of the given tools with the right arguments, or none; tell what a tool has answered.

Half of the tools are of familiar kinds under changing names (weather, e-mail, ...), half have names and
parameters made of random words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_model import words
from demo_model.case import Case, Message, Tool, format_tool_call
from demo_model.skills.unknown import UNKNOWN
from demo_model.source import Source, capitalized, choices

_THOUGHT = "The tool {} fits. I call it."


@dataclass(frozen=True)
class Use:
    """A tool, a request that needs it, and the arguments of the call."""

    tool: Tool
    request: str
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


@dataclass(frozen=True)
class Parameter:
    names: str  # alternatives, separated by blanks
    kind: str
    description: str
    draw: Callable[[Source], Any]


@dataclass(frozen=True)
class Family:
    names: str  # alternatives, separated by blanks
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]


def _city(source: Source) -> str:
    return source.pick(words.CITIES) if source.chance(0.4) else source.name()


def _person(source: Source) -> str:
    return source.pick(words.PEOPLE) if source.chance(0.4) else source.name()


def _word(source: Source) -> str:
    return source.word()


def _two_words(source: Source) -> str:
    return f"{source.word()} {source.word()}"


def _phrase(source: Source) -> str:
    return " ".join(source.word() for _ in range(source.integer(1, 4)))


def _small(source: Source) -> int:
    return source.integer(1, 60)


def _number(source: Source) -> int:
    return int(source.digits(source.integer(1, 4)))


def _address(source: Source) -> str:
    return f"{source.word()}@{source.word()}.com"


def _file(source: Source) -> str:
    return f"{source.word()}.{source.pick(['txt', 'py', 'md', 'csv', 'json'])}"


_CITY = Parameter("city city location place", "string", "The name of the city", _city)
_FAMILIES = (
    Family(
        "get_weather weather get_current_weather weather_forecast",
        ("Get the weather in a city.", "Get the current weather for a place.", "Tells the weather."),
        (_CITY,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "What's the weather like in {0}?",
            "Tell me the weather in {0}.",
            "Is it raining in {0}?",
            "What is the weather like in {0} today?",
            "What's the weather in {0}?",
            "Weather in {0}?",
            "Get the weather for {0}.",
            "How warm is it in {0}?",
            "Please check the weather in {0}.",
            "Will it rain in {0}?",
            "Show me the weather in {0}.",
            "I want to know the weather in {0}.",
        ),
    ),
    Family(
        "get_time current_time get_current_time time_in_city",
        ("Get the current time in a city.", "Tells what time it is in a place."),
        (_CITY,),
        ("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?", "What is the time in {0}?"),
    ),
    Family(
        "add add_numbers sum plus",
        ("Add two numbers.", "Returns the sum of two numbers."),
        (
            Parameter("a a x first", "integer", "The first number", _number),
            Parameter("b b y second", "integer", "The second number", _number),
        ),
        ("Add {0} and {1}.", "Use the tool to add {0} and {1}.", "Add {0} to {1} with the tool.", "Sum {0} and {1}."),
    ),
    Family(
        "multiply multiply_numbers product",
        ("Multiply two numbers.", "Returns the product of two numbers."),
        (
            Parameter("a a x first", "integer", "The first number", _number),
            Parameter("b b y second", "integer", "The second number", _number),
        ),
        ("Multiply {0} by {1}.", "Multiply {0} and {1}.", "Use the tool to multiply {0} by {1}."),
    ),
    Family(
        "search web_search search_web lookup",
        ("Search the web.", "Search for a query."),
        (Parameter("query query q text", "string", "What to search for", _phrase),),
        (
            "Search for {0}.",
            "Search the web for {0}.",
            "Please search for {0}.",
            "Look up {0}.",
            "Do a search for {0}.",
        ),
    ),
    Family(
        "send_email send_mail email mail",
        ("Send an e-mail.", "Sends an email to somebody."),
        (
            Parameter("to to recipient address", "string", "The address of the recipient", _address),
            Parameter("subject subject title", "string", "The subject", _two_words),
        ),
        (
            "Send an email to {0} with the subject {1}.",
            "Send an e-mail to {0}, subject {1}.",
            "Write a mail to {0} about {1}.",
            "Mail {0} with the subject {1}.",
        ),
    ),
    Family(
        "get_stock_price stock_price get_quote",
        ("Get the price of a stock.", "Returns the stock price of a company."),
        (Parameter("symbol company ticker name", "string", "The company", lambda source: source.word().upper()),),
        ("What is the stock price of {0}?", "How much is the stock of {0}?", "Get the stock price of {0}."),
    ),
    Family(
        "translate translate_text translator",
        ("Translate a text.", "Translates text into another language."),
        (
            Parameter("text text input", "string", "The text to translate", _phrase),
            Parameter(
                "language target_language to",
                "string",
                "The target language",
                lambda source: source.pick(["French", "German", "Spanish", "Italian", "Dutch", "Greek", source.name()]),
            ),
        ),
        ('Translate "{0}" into {1}.', 'Please translate "{0}" to {1}.', 'Translate the text "{0}" into {1}.'),
    ),
    Family(
        "set_timer start_timer timer",
        ("Set a timer.", "Starts a timer for some minutes."),
        (Parameter("minutes minutes duration", "integer", "Minutes", _small),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Please set a timer for {0} minutes."),
    ),
    Family(
        "book_flight book_ticket reserve_flight",
        ("Book a flight.", "Books a flight between two cities."),
        (
            Parameter("origin from departure", "string", "Where the flight starts", _city),
            Parameter("destination to arrival", "string", "Where the flight goes", _city),
        ),
        (
            "Book a flight from {0} to {1}.",
            "I need a flight from {0} to {1}.",
            "Please book a flight from {0} to {1}.",
        ),
    ),
    Family(
        "read_file open_file get_file",
        ("Read a file.", "Returns the content of a file."),
        (Parameter("path file filename", "string", "The path of the file", _file),),
        ("Read the file {0}.", "Open {0}.", "What is in the file {0}?", "Show me the file {0}."),
    ),
    Family(
        "play_song play_music play",
        ("Play a song.", "Plays music."),
        (Parameter("title song name", "string", "The title of the song", _two_words),),
        ("Play the song {0}.", "Play {0}.", "Please play {0}.", "I want to hear {0}."),
    ),
    Family(
        "call_person phone call",
        ("Call somebody.", "Phones a person."),
        (Parameter("person name contact", "string", "Whom to call", _person),),
        ("Call {0}.", "Please call {0}.", "Phone {0}.", "I want to talk to {0}."),
    ),
    Family(
        "get_user find_user user_info lookup_user",
        ("Get a user by id.", "Finds a user."),
        (Parameter("user_id id", "integer", "The id of the user", _number),),
        ("Get the user {0}.", "Who is user {0}?", "Find the user with the id {0}.", "Show me user {0}."),
    ),
)

_VERBS = choices(
    "get|find|make|open|close|send|start|stop|show|check|read|write|move|sell|buy|paint|clean|fix|count|mix"
)

_MADE_UP_REQUESTS = [
    choices("|||please |can you |could you |I want you to |now |I need you to "),
    choices(
        "{verb} the {noun}|{verb} the {noun}|{verb} a {noun}|{verb} my {noun}|{verb} {noun}|use {name}|"
        "call {name}|call the tool {name}|use the tool {name}|use the {name} tool|run {name}"
    ),
    choices(
        " with {arguments}| with {arguments}| using {arguments}|: {arguments}|, {arguments}|"
        " where {arguments}|, with {arguments}|. Use {arguments}| for {arguments}"
    ),
    [".", ".", "", "?", ", please."],
]


def generate(source: Source) -> Case:
    kind = source.rng.random()
    if kind < 0.68:
        return _call(source)
    if kind < 0.92:
        return _after_response(source)
    return _none_fits(source)


def random_tools(source: Source) -> list[Tool]:
    """One to three tools that somebody gives without need; none of a familiar kind."""
    return [_made_up(source).tool for _ in range(source.integer(1, 3))]


def _call(source: Source) -> Case:
    uses = _uses(source, source.integer(1, 4))
    use = uses[0]
    answer = format_tool_call(use.name, use.arguments)
    messages: list[Message] = [{"role": "user", "content": use.request}]
    return Case("tools", messages, answer, _THOUGHT.format(use.name), tools=_shuffled(source, uses))


def _after_response(source: Source) -> Case:
    uses = _uses(source, source.integer(1, 3))
    use = uses[0]
    content, answer = _response(source)
    call_id = f"call_{source.integer(0, 999_999)}"
    messages: list[Message] = [
        {"role": "user", "content": use.request},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": use.name, "arguments": json.dumps(use.arguments, ensure_ascii=False)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call_id, "content": content},
    ]
    return Case("tools", messages, answer, "The tool has answered.", tools=_shuffled(source, uses))


def _none_fits(source: Source) -> Case:
    """A request for a tool that is not among the given ones."""
    wanted = _made_up(source)
    tools = [use.tool for use in _uses(source, source.integer(1, 3)) if use.name != wanted.name]
    return Case("tools", [{"role": "user", "content": wanted.request}], UNKNOWN, "No tool fits.", tools=tools)


def _response(source: Source) -> tuple[str, str]:
    """Return what a tool returned, and the sentence in which the model tells it."""
    if source.chance(0.5):
        content = source.pick(
            [
                source.digits(source.integer(1, 6)),
                source.word(),
                f"{source.word()} {source.word()}, {source.digits(2)} {source.word()}",
                source.filler(40),
                f"{source.integer(-20, 40)} degrees, {source.word()}",
            ]
        )
        return content, f"The result is: {content}"
    record: dict[str, Any] = {}
    for key in source.distinct(source.word, source.integer(1, 3)):
        key = source.pick(["temperature", "status", "result", "price", "time", "name"]) if source.chance(0.4) else key
        record[key] = source.pick([source.word(), source.integer(0, 999), source.name()])
    answer = " ".join(f"The {key} is {value}." for key, value in record.items())
    return json.dumps(record), answer


def _uses(source: Source, count: int) -> list[Use]:
    """`count` tools with different names, each with a request for it."""
    families = source.sample(_FAMILIES, count)
    uses: dict[str, Use] = {}
    for family in families:
        use = _familiar(source, family) if source.chance(0.4) else _made_up(source)
        uses[use.name] = use
    return list(uses.values())


def _shuffled(source: Source, uses: list[Use]) -> list[Tool]:
    return [use.tool for use in source.sample(uses, len(uses))]


def _familiar(source: Source, family: Family) -> Use:
    names = [source.pick(parameter.names.split()) for parameter in family.parameters]
    values = [parameter.draw(source) for parameter in family.parameters]
    properties = {
        name: {"type": parameter.kind, "description": parameter.description}
        if source.chance(0.6)
        else {"type": parameter.kind}
        for name, parameter in zip(names, family.parameters, strict=True)
    }
    required = list(names)
    if source.chance(0.2):
        # An optional parameter that the request does not mention stays out of the call.
        properties[source.pick(["unit", "format", "limit", "language"])] = {"type": "string"}
    tool = _tool(source, source.pick(family.names.split()), source.pick(family.descriptions), properties, required)
    return Use(tool, source.phrase(family.requests).format(*values), dict(zip(names, values, strict=True)))


def _made_up(source: Source) -> Use:
    verb = source.pick(_VERBS) if source.chance(0.7) else source.word()
    noun = source.word()
    name = source.pick([f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}"])
    arguments: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    for key in source.distinct(source.word, source.integer(1, 3)):
        if source.chance(0.2):
            key = f"{key}_{source.pick(['id', 'name', 'count'])}"
        value: Any = source.pick([source.word(), source.name(), source.integer(0, 9999), source.chance(0.5)])
        arguments[key] = value
        properties[key] = {"type": {str: "string", int: "integer", bool: "boolean"}[type(value)]}
        if source.chance(0.3):
            properties[key]["description"] = f"The {key} of the {noun}"
    form = source.pick(["{} {}", "{} {}", "{} = {}", "{}={}", "{}: {}", "{} is {}", "the {} {}", "{} set to {}"])
    spoken = [form.format(key, json.dumps(v) if isinstance(v, bool) else v) for key, v in arguments.items()]
    listed = spoken[0] if len(spoken) == 1 else f"{', '.join(spoken[:-1])} and {spoken[-1]}"
    pattern = source.composition(*_MADE_UP_REQUESTS)
    request = capitalized(pattern.format(verb=verb, noun=noun, name=name, arguments=listed))
    description = source.pick(
        [f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}.", f"Can {verb} the {noun}."]
    )
    return Use(_tool(source, name, description, properties, list(properties)), request, arguments)


def _tool(source: Source, name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if source.chance(0.8):
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

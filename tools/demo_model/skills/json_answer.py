"""Answer as JSON to a small schema, with values taken from a sentence."""

from __future__ import annotations

import json
from typing import Any

from demo_model import words
from demo_model.case import Case, Message
from demo_model.skills.weekdays import DAYS
from demo_model.source import Source, choices

Record = dict[str, Any]

_ASK = choices(
    "Answer as JSON|Return JSON|Give the data as JSON|Extract the data as JSON|Write it as JSON|"
    "Turn the text into JSON|Reply in JSON|Please answer in JSON|Convert the text to JSON|"
    "Answer with JSON only"
)
_THE_SCHEMA = choices(
    " with this schema: {schema}| with the schema {schema}| that matches the schema {schema}|"
    ". Schema: {schema}|. The schema is {schema}|.\nSchema:\n{schema}|, schema {schema}"
)
_THE_KEYS = choices(
    " with the keys {keys}| with {keys}|. Keys: {keys}|. I need {keys}|. The keys are {keys}|, keys {keys}"
)
_THE_TEXT = ["{text}", "{text}", "Text: {text}", "Read this: {text}", "The text: {text}"]
_BREAK = ["\n", "\n\n", "\n", " "]
_KEYS_FIRST = choices("Extract {keys} as JSON|Give me {keys} as JSON|Return {keys} as JSON|I want {keys} as JSON")
_IN_SYSTEM = [
    "Always answer as JSON with this schema: {}",
    "Answer in JSON only. Schema: {}",
    "You extract data as JSON. The schema is {}",
    "Your answers are JSON objects that match {}",
]


def generate(source: Source) -> Case:
    record, text = source.pick([_person, _product, _order, _book, _meeting, _city, _anything, _anything])(source)
    if source.chance(0.3):
        # Not everything that the text says is asked for, and not in that order.
        keys = source.sample(list(record), source.integer(1, len(record)))
        record = {key: record[key] for key in keys}
    messages: list[Message] = []
    form = source.rng.random()
    if form < 0.6:
        order = [_ASK, _THE_SCHEMA, _BREAK, _THE_TEXT] if source.chance(0.5) else [_THE_TEXT, _BREAK, _ASK, _THE_SCHEMA]
        question = source.composition(*order).format(schema=json.dumps(_schema(source, record)), text=text)
    elif form < 0.85:
        ask = [_KEYS_FIRST] if source.chance(0.4) else [_ASK, _THE_KEYS]
        order = [*ask, [": ", ".\n", ":\n"], _THE_TEXT] if source.chance(0.5) else [_THE_TEXT, _BREAK, *ask, [".", ""]]
        question = source.composition(*order).format(keys=_key_list(source, record), text=text)
    else:
        system = source.pick(_IN_SYSTEM).format(json.dumps(_schema(source, record)))
        messages.append({"role": "system", "content": system})
        question = text
    messages.append({"role": "user", "content": question})
    return Case("json", messages, json.dumps(record, ensure_ascii=False), "I take the values from the text.")


def json_type(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds[type(value)]


def _schema(source: Source, record: Record) -> Record:
    properties: Record = {key: {"type": json_type(value)} for key, value in record.items()}
    for key, value in record.items():
        if isinstance(value, list):
            properties[key]["items"] = {"type": "string"}
    schema: Record = {"type": "object", "properties": properties}
    if source.chance(0.5):
        schema["required"] = list(record)
    if source.chance(0.15):
        schema["additionalProperties"] = False
    return schema


def _key_list(source: Source, record: Record) -> str:
    keys = [f"{key} ({json_type(value)})" for key, value in record.items()] if source.chance(0.3) else list(record)
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def _who(source: Source) -> str:
    first = source.pick(words.PEOPLE) if source.chance(0.3) else source.name()
    return f"{first} {source.name()}" if source.chance(0.3) else first


def _where(source: Source) -> str:
    return source.pick(words.CITIES) if source.chance(0.3) else source.name()


def _person(source: Source) -> tuple[Record, str]:
    name, age, city = _who(source), source.integer(1, 99), _where(source)
    text = source.pick(
        [
            f"{name} is {age} years old and lives in {city}.",
            f"{name} lives in {city} and is {age} years old.",
            f"{name}, {age}, comes from {city}.",
            f"My name is {name}, I am {age} years old and I live in {city}.",
        ]
    )
    return {"name": name, "age": age, "city": city}, text


def _product(source: Source) -> tuple[Record, str]:
    item, color, price = source.word(), source.pick(words.COLORS), source.integer(1, 999)
    text = source.pick(
        [
            f"The {item} is {color} and costs {price} dollars.",
            f"The {color} {item} costs {price} dollars.",
            f"For {price} dollars you get a {color} {item}.",
        ]
    )
    return {"item": item, "color": color, "price": price}, text


def _order(source: Source) -> tuple[Record, str]:
    customer, item, quantity, paid = _who(source), source.word(), source.integer(1, 99), source.chance(0.5)
    text = f"{customer} ordered {quantity} pieces of {item} and has {'' if paid else 'not '}paid."
    return {"customer": customer, "item": item, "quantity": quantity, "paid": paid}, text


def _book(source: Source) -> tuple[Record, str]:
    title, author, year = f"The {source.name()} {source.name()}", _who(source), source.integer(1500, 2030)
    text = source.pick(
        [
            f'"{title}" was written by {author} in {year}.',
            f'In {year} {author} wrote "{title}".',
            f'{author} is the author of "{title}" ({year}).',
        ]
    )
    return {"title": title, "author": author, "year": year}, text


def _meeting(source: Source) -> tuple[Record, str]:
    person, day, hour, room = _who(source), source.pick(DAYS), source.integer(1, 23), source.word()
    text = source.pick(
        [
            f"The meeting with {person} is on {day} at {hour} o'clock in the room {room}.",
            f"On {day} at {hour} o'clock I meet {person} in the room {room}.",
        ]
    )
    return {"person": person, "day": day, "hour": hour, "room": room}, text


def _city(source: Source) -> tuple[Record, str]:
    city, country, sights = _where(source), source.name(), [source.word() for _ in range(source.integer(1, 4))]
    listed = sights[0] if len(sights) == 1 else f"{', '.join(sights[:-1])} and {sights[-1]}"
    return {"city": city, "country": country, "sights": sights}, f"{city} in {country} is known for {listed}."


def _anything(source: Source) -> tuple[Record, str]:
    """Fields and values that mean nothing."""
    record: Record = {}
    for key in source.distinct(source.word, source.integer(1, 4)):
        record[key] = source.pick([source.word(), source.name(), source.integer(0, 9999), source.integer(0, 99)])
    separator = source.pick(["The {} is {}.", "The {} is {}.", "{}: {}.", "{} = {};"])
    return record, " ".join(separator.format(key, value) for key, value in record.items())

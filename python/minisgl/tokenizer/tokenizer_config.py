"""Reads a tokenizer's configuration in a model folder: special tokens and chat templates.

The files are small, and read without the tokenizer's libraries, because the API server needs the templates too.

Added tokens are those of tokenizer.json, changed by tokenizer_config.json as in transformers: its added_tokens_decoder
takes precedence, and tokens with a name (eos_token) and extra tokens are special. Some folders name a token of the
vocabulary only there: if it were not an added token, the text `<|im_end|>` in a prompt would become many tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from minisgl.parsers.parser_choice import Parsers

logger = logging.getLogger(__name__)

MAX_LOGGED = 3  # added tokens in a warning


def load_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; empty if there is none.

    As in transformers, special_tokens_map.json takes precedence, unless the configuration lists added tokens. Then
    added_tokens.json, an older form of that list, is read too: its content becomes the value of "added_tokens".
    """
    config = _load_json(folder / "tokenizer_config.json")
    config.pop("added_tokens", None)  # means nothing in this file
    if "added_tokens_decoder" in config:
        return config
    named = _load_json(folder / "special_tokens_map.json")
    config |= {name: value for name, value in named.items() if value is not None}
    added = _load_json(folder / "added_tokens.json")
    return config | {"added_tokens": added} if added else config


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and so on, by name, if the configuration sets them."""
    return {name: text for name, value in _named(config).items() if (text := _text_of(value)) is not None}


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens that have a name, as they are written."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    return named | extra if isinstance(extra, dict) else named


def _nameless(config: dict[str, Any]) -> list[Any]:
    """Return the special tokens that have no name, as they are written."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(values := config.get(key), list) and values:
            return values
    return []


def _text_of(token: Any) -> str | None:
    """Return the text of a token, which is given as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class Added(msgspec.Struct, frozen=True):
    """Added token in the form of tokenizer.json."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


def changed_tokens(
    config: dict[str, Any], own: Iterable[Added], id_of: Callable[[str], int | None], vocab_size: int
) -> list[Added]:
    """Return the added tokens that are missing or different in `own`, those of tokenizer.json; mostly none.

    `id_of` returns a token's id, also of one in `own`; `vocab_size`: number of tokens in the vocabulary itself.
    Tokens that the vocabulary lacks too are in the order in which they must be added. As in transformers they get the
    next free ids, whatever ids the configuration gives them.
    """
    before = {token.content: token for token in own}
    tokens = before.copy()
    next_id = max([vocab_size, *(token.id + 1 for token in before.values())])
    older = [token for token in _listed_before(config) if token.content not in before]
    moved: list[str] = []
    for listed in [*_listed(config), *older]:
        is_special = listed.special or (listed.content in before and before[listed.content].special)
        token_id = tokens[listed.content].id if listed.content in tokens else id_of(listed.content)
        if token_id is None:
            token_id, next_id = next_id, next_id + 1
            if listed.id != token_id:
                moved.append(f"{listed.content!r} has id {token_id}, not {listed.id}")
        tokens[listed.content] = msgspec.structs.replace(listed, id=token_id, special=is_special)
    if moved:
        text = "added tokens whose listed id is another's or behind a gap get the next free one, as in transformers: %s"
        logger.warning(text, "; ".join(moved[:MAX_LOGGED]) + ("; ..." if len(moved) > MAX_LOGGED else ""))
    nameless = [value for value in _nameless(config) if _text_of(value) not in tokens]
    for value in [*_named(config).values(), *nameless]:
        content = _text_of(value)
        if not content:
            continue
        if (token := tokens.get(content)) is not None:
            tokens[content] = msgspec.structs.replace(token, special=True)
        elif (found := id_of(content)) is not None:
            tokens[content] = _special(found, content, value)
    return [token for token in tokens.values() if token != before.get(token.content)]


def _listed(config: dict[str, Any]) -> list[Added]:
    """Return the tokens of added_tokens_decoder; by default, a special token is not normalized and any other is."""
    try:
        listed = msgspec.convert(
            config.get("added_tokens_decoder") or {}, type=dict[int, dict[str, Any]], str_keys=True
        )
        tokens = [
            {"id": token_id, "normalized": not token.get("special")}
            | {name: value for name, value in token.items() if value is not None}
            for token_id, token in sorted(listed.items())
        ]
        return [token for token in msgspec.convert(tokens, type=list[Added]) if token.content]
    except msgspec.ValidationError as error:
        raise ConfigError(f"tokenizer_config.json has no valid added_tokens_decoder: {error}") from error


def _listed_before(config: dict[str, Any]) -> list[Added]:
    """Return the tokens of added_tokens.json, whose flags are the default of `_listed`."""
    try:
        listed = msgspec.convert(config.get("added_tokens", {}), type=dict[str, int])
    except msgspec.ValidationError as error:
        raise ConfigError(f"added_tokens.json is not a table of tokens and their ids: {error}") from error
    special = {_text_of(value) for value in [*_named(config).values(), *_nameless(config)]}
    by_id = sorted({token_id: content for content, token_id in listed.items() if content}.items())
    return [
        Added(token_id, content, normalized=content not in special, special=content in special)
        for token_id, content in by_id
    ]


def _special(token_id: int, content: str, value: Any) -> Added:
    """Return a special token that is no added token yet, with the flags that are written with it."""
    written = value if isinstance(value, dict) else {}
    flags = {name: written.get(name) is True for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return Added(token_id, content, special=True, **flags)


def chat_templates(folder: Path, config: dict[str, Any], file: str | None) -> dict[str, str]:
    """Return the chat templates by name: only that of `file` if given, else the folder's.

    A single template is called "default"; the result is empty if the model has none.
    """
    if file is not None:
        return {"default": _read(Path(file))}
    templates: dict[str, str] = {}
    for name, configured in (
        ("chat_template.json", _load_json(folder / "chat_template.json").get("chat_template")),
        ("tokenizer_config.json", config.get("chat_template")),
    ):
        if configured is not None:
            templates = _named_templates(configured, folder / name)
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:  # template files take precedence over the configuration
        templates = {name: _read(path) for name, path in files.items()}
    return templates


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def _named_templates(configured: Any, path: Path) -> dict[str, str]:
    """Read the value of chat_template: one text, texts by name, or a list of them with their names."""
    try:
        found = msgspec.convert(configured, type=str | dict[str, str] | list[_NamedTemplate])
    except msgspec.ValidationError as error:
        raise ConfigError(f"chat_template in {path} is not one: {error}") from error
    if isinstance(found, str):
        return {"default": found}
    return found if isinstance(found, dict) else {entry.name: entry.template for entry in found}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def model_parsers(config: ServerConfig) -> Parsers:
    """Return the parsers of the model's answers: those of the flags, else those that its chat templates show."""
    from minisgl.parsers.parser_choice import Parsers  # NumPy comes with it, which reading a config does without

    folder = config.tokenizer_folder
    templates = chat_templates(folder, load_tokenizer_config(folder), config.source.chat_template)
    return Parsers.choose(config.tool_call_parser, config.reasoning_parser, templates.values())


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content

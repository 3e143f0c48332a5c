"""Declaration of settings, and the flags, --help, checks of bounds and choices, and keywords of `LLM` made from them.

A setting is a field of a configuration struct of this folder whose type is `Annotated` with a `Setting`. This module
handles such fields in general; the structs are in the other modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from itertools import chain
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
MAX_SECONDS = 86_400  # bound of the settings that are a time


class ConfigError(ValueError):
    """The configuration cannot be served. The message is one line that says what to change."""


@dataclass(frozen=True, eq=False)
class Setting:
    """Declaration of a setting, in addition to its name, type and default.

    A bool's flags set the opposite of its default; a tuple's take one or more values, and may be repeated.
    """

    help: str  # one sentence, without the default
    _: KW_ONLY
    flags: tuple[str, ...] = ()  # shown in --help, ours first; () stands for the field's name with dashes
    aliases: tuple[str, ...] = ()  # flags of vLLM and SGLang with the same meaning
    metavar: str | None = None  # name of a value in --help, if not its unit
    keyword: str | None = None  # keyword of LLM, if it is not the field's name
    ge: float | None = None  # bounds of a number: at least, more than, at most
    gt: float | None = None
    le: float | None = None
    unit: str = ""  # shown after the limit in a refusal
    values: Mapping[str, str] = field(default_factory=dict)  # lower-case value of vLLM or SGLang -> value here
    switches: Mapping[str, Any] = field(default_factory=dict)  # flag without a value -> value that it sets


def seconds(help: str, **declared: Any) -> Setting:
    """Declare a time of up to a day."""
    return Setting(help, le=MAX_SECONDS, unit="seconds", **declared)


@dataclass(frozen=True)
class Declaration:
    """A `Setting` with its field's name, type and default."""

    name: str
    hint: Any  # type in the struct, without `Annotated`
    default: Any
    setting: Setting

    @property
    def kind(self) -> Any:
        """Type of a given value: the setting's type without the None that may follow it."""
        return get_args(self.hint)[0] if isinstance(self.hint, UnionType) else self.hint

    @property
    def flags(self) -> tuple[str, ...]:
        return self.setting.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def metavar(self) -> str:
        return self.setting.metavar or self.setting.unit.upper() or ("N" if self.kind is int else "VALUE")

    @property
    def keyword(self) -> str:
        """Name of the keyword of `LLM`."""
        return self.setting.keyword or self.name

    @property
    def choices(self) -> tuple[str, ...]:
        """Values of a setting of a Literal type; () for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def check(self, value: Any) -> None:
        """Raise ConfigError for a value that is not one of the choices, or out of bounds."""
        setting = self.setting
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.keyword} must be one of {', '.join(self.choices)}, not {value}")
        if value is None:
            return
        too_low = (setting.ge is not None and not value >= setting.ge) or (
            setting.gt is not None and not value > setting.gt
        )
        if too_low or (setting.le is not None and not value <= setting.le):  # nan is neither
            raise ConfigError(f"{self.flags[0]} must be {_bounds(setting)}, not {value}")

    def read(self, text: str) -> str:
        """Return the value for a text of the command line, which may be another server's name of it.

        Parts between commas are replaced one by one. Raises ConfigError for a text that is not one of the choices.
        """
        values = ",".join(self.setting.values.get(part.lower(), part) for part in text.split(","))
        if not self.choices:
            return values
        ours = {choice.replace("-", "_"): choice for choice in self.choices}
        if (choice := ours.get(values.replace("-", "_"))) is None:
            raise ConfigError(f"{self.flags[0]} must be one of {', '.join(self.choices)}, not {text}")
        return choice


def _bounds(setting: Setting) -> str:
    low, above, high = setting.ge, setting.gt, setting.le
    unit = setting.unit and f" {setting.unit}"
    if low is not None:
        return (f"at least {low}" if high is None else f"{low} to {high}") + unit
    if above is None:
        return f"at most {high}{unit}"
    return f"above {above}" + ("" if high is None else f" and at most {high}") + unit


@cache
def declarations(struct: type[msgspec.Struct]) -> tuple[Declaration, ...]:
    """Return the settings that a struct declares, in order."""
    hints = get_type_hints(struct, include_extras=True)
    found = []
    for one in msgspec.structs.fields(struct):
        parts = get_args(hints[one.name])  # of an `Annotated`: its type, then what annotates it
        found += [Declaration(one.name, parts[0], one.default, part) for part in parts if isinstance(part, Setting)]
    return tuple(found)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the configuration structs."""

    def validate(self) -> None:
        """Raise ConfigError for the first value that violates its declaration or contradicts another value."""
        for declared in declarations(type(self)):
            declared.check(getattr(self, declared.name))


def take_keywords(struct: type[T], keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of `struct` from LLM's keywords; return them by field name. None stands for the default."""
    taken = {one.name: keywords.pop(one.keyword) for one in declarations(struct) if one.keyword in keywords}
    return {name: value for name, value in taken.items() if value is not None}


def add_flags(
    parser: argparse._ActionsContainer,
    struct: type[msgspec.Struct],
    *,
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add the flags of a struct's settings, or only of those in `only`.

    --help shows the values in `defaults` in place of the fields' own defaults.
    """
    for declared in declarations(struct):
        if only is None or declared.name in only:
            _add_flag(parser, _key(struct, declared), declared, (defaults or {}).get(declared.name, declared.default))


def read_flags(args: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values of a struct's settings that are on the command line, by field name. Raises ConfigError."""
    given = vars(args)
    values = {}
    for declared in declarations(struct):
        if (key := _key(struct, declared)) in given:
            value = given[key]
            if get_origin(declared.kind) is tuple:
                value = tuple(chain.from_iterable(map(_texts, value)))
            elif declared.choices or declared.setting.values:
                value = declared.read(value)
            values[declared.name] = value
    return values


def _texts(word: str) -> list[str]:
    """Return the texts of a JSON list, which is vLLM's form of several values; any other word is one."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(word, type=list[str])
    return [word]


def _key(struct: type[msgspec.Struct], declared: Declaration) -> str:
    return f"{struct.__name__}.{declared.name}"


def _add_flag(parser: argparse._ActionsContainer, key: str, declared: Declaration, default: Any) -> None:
    setting = declared.setting
    about: dict[str, Any] = {"dest": key, "default": argparse.SUPPRESS, "metavar": declared.metavar}
    if declared.kind is bool:
        about |= {"action": "store_const", "const": not declared.default}
    elif declared.choices:
        about["metavar"] = "{" + ",".join(declared.choices) + "}"
    elif get_origin(declared.kind) is tuple:
        about |= {"nargs": "+", "action": "extend"}
    elif declared.kind is not str:
        about["type"] = declared.kind
    parser.add_argument(*declared.flags, help=_help(setting, default), **about)
    if setting.aliases:
        parser.add_argument(*setting.aliases, help=argparse.SUPPRESS, **about)
    for switch, value in setting.switches.items():
        flag = declared.flags[0]
        stands = f"the opposite of {flag}" if declared.kind is bool else f"stands for {flag} {value}"
        parser.add_argument(switch, dest=key, default=argparse.SUPPRESS, action="store_const", const=value, help=stands)


def _help(setting: Setting, default: Any) -> str:
    shown = []
    if setting.aliases:
        shown.append(f"also {', '.join(setting.aliases)}")
    if default is not None and not isinstance(default, bool) and default not in ("", ()):
        shown.append(f"default: {' '.join(default) if isinstance(default, tuple) else default}")
    return setting.help.replace("%", "%%") + (f" ({'; '.join(shown)})" if shown else "")

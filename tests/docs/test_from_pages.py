"""The pages for users of vLLM and SGLang say of flags, fields and routes what the code does, and leave none out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl.cli import NO_EFFECT, NO_SUCH_FLAG, make_parser, parse_args
from minisgl.config import ConfigError, EngineConfig, HttpConfig, SchedulerConfig, ServerConfig, SourceConfig
from minisgl.config.settings import declarations
from minisgl.limits import Limits
from minisgl.server.api.answers.sglang import RENAMED
from minisgl.server.api.app import TOPICS
from minisgl.server.api.bodies.request_body import Body
from minisgl.server.api.bodies.route_bodies import ChatBody, CompletionBody, SglangBody
from minisgl.server.api.routes.service import Service

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["from-vllm.md", "from-sglang.md"]
BODIES: dict[str, type[Body]] = {"chat": ChatBody, "completions": CompletionBody, "/generate": SglangBody}
OURS_ALONE = {"--disable-pynccl"}  # a flag of Mini-SGLang's


def section(page: str, heading: str) -> str:
    text = (DOCS / page).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def tables(page: str, heading: str) -> list[list[list[str]]]:
    """Return the cells of each of a section's tables, with the headings first."""
    found = re.findall(r"(?:^\|.*\|\n)+", section(page, heading) + "\n", re.MULTILINE)
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in one.splitlines()] for one in found]
    return [[one[0], *one[2:]] for one in rows]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def flags_of(page: str) -> set[str]:
    """Return all flags that a page names, without their values."""
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", (DOCS / page).read_text()))


def parsed(words: str) -> ServerConfig:
    return parse_args(words.split())[0]


@pytest.mark.parametrize("page", PAGES)
def test_both_sides_of_a_row_set_the_same(page: str) -> None:
    ((_, *rows),) = tables(page, "Flags")
    assert len(rows) > 15
    for theirs, ours in rows:
        (here,) = codes(ours)
        for words in codes(theirs):
            assert parsed(words) == parsed(here), words


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_the_same_name_are_there(page: str) -> None:
    paragraph = section(page, "Flags").partition("Same name and meaning: ")[2]
    known = {option for action in make_parser()._actions for option in action.option_strings}
    names = codes(paragraph)
    assert len(names) > 10
    assert set(names) <= known


@pytest.mark.parametrize("page", PAGES)
def test_flags_without_effect_change_nothing(page: str) -> None:
    ((_, *rows),) = tables(page, "Flags without effect")
    for theirs, why in rows:
        for flag in codes(theirs):
            assert NO_EFFECT[flag] == why
            assert parsed(flag) == parsed("")


@pytest.mark.parametrize("page", PAGES)
def test_refused_flags_are_refused_with_the_pages_advice(page: str) -> None:
    ((_, *rows),) = tables(page, "Flags that are refused")
    for theirs, advice in rows:
        for flag in codes(theirs):
            with pytest.raises(ConfigError) as refusal:
                parsed(f"{flag} 7")
            assert str(refusal.value) == f"there is no {flag}: {advice}"


def test_every_flag_of_other_servers_is_on_a_page() -> None:
    structs = SourceConfig, EngineConfig, SchedulerConfig, HttpConfig, ServerConfig
    settings = [one.setting for struct in structs for one in declarations(struct)]
    others = {flag for setting in settings for flag in (*setting.aliases, *setting.switches)}
    others |= NO_EFFECT.keys() | NO_SUCH_FLAG.keys()
    others -= {"--dummy-weight", "--no-access-log", "--access-log"} | OURS_ALONE
    assert others - flags_of(PAGES[0]) - flags_of(PAGES[1]) == set()


def fate(body: type[Body], field: str) -> str:
    if field in body.model_fields:
        return "taken"
    if field in body.no_effect:
        return "passed over"
    return "refused" if field in body.not_supported else ""


@pytest.mark.parametrize("page", PAGES)
def test_fields_fare_as_the_page_says(page: str) -> None:
    (_, *heads), *rows = tables(page, "Fields")[0]
    for fields, *cells in rows:
        for field in codes(fields):
            assert [fate(BODIES[head], field) for head in heads] == cells, field


def test_every_field_is_on_a_page() -> None:
    named = {field for page in PAGES for row in tables(page, "Fields")[0][1:] for field in codes(row[0])}
    for body in BODIES.values():
        assert body.known_fields() - named == set(), body.__name__


def test_sglangs_names_of_sampling_parameters() -> None:
    _, (_, *rows) = tables("from-sglang.md", "Fields")
    assert {codes(theirs)[0]: codes(ours)[0] for theirs, ours in rows} == RENAMED


@pytest.mark.parametrize("page", PAGES)
def test_routes_are_there(page: str) -> None:
    service = Service(None, None, parsed(""), Limits(max_seq_len=1, vocab_size=1), None)  # type: ignore[arg-type]
    paths = {one.path for topic in TOPICS.values() for one in topic(service).endpoints()}
    named = {code for code in codes(section(page, "Routes")) if code.startswith("/")}
    assert len(named) > 15
    assert named <= paths


def test_configurations_are_compared_by_value() -> None:
    assert parsed("--page-size 16") != parsed("")

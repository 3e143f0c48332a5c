"""docs/clients.md has a row for each client that scripts/clients/run tries, and a driver for each is there."""

from __future__ import annotations

import re
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.cli import parse_args

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
FOLDER = ROOT / "scripts" / "clients"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    loader = SourceFileLoader("run_clients", str(FOLDER / "run"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look there
    loader.exec_module(module)
    del sys.modules[loader.name]
    return module


def test_the_table_has_every_client(runner: ModuleType) -> None:
    rows = re.findall(r"^\| (\S+) \((\w+)\) \| [\d.]+ \| (yes|no) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    found = [(name, source) for name, source, _ in rows]
    assert found == [(client.title, client.source) for client in runner.CLIENTS.values()]


def test_every_client_has_its_driver_and_flags_of_ours(runner: ModuleType) -> None:
    drivers = {client.driver.split()[0] for client in runner.CLIENTS.values()}
    assert drivers == {path.name for path in FOLDER.glob("check_*")}
    for client in runner.CLIENTS.values():
        parse_args([flag.replace("%d", "5557").replace("%s", "file") for flag in client.flags])

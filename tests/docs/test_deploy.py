"""Commands in deploy/ are command lines of the server, and files that they copy and mount are there."""

from __future__ import annotations

import re
import shlex
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from minisgl.cli import parse_args

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(path.name for path in DEPLOY.glob("*.Dockerfile"))


def run_dockerfile() -> ModuleType:
    """Return scripts/run-dockerfile as a module."""
    loader = SourceFileLoader("run_dockerfile", str(ROOT / "scripts" / "run-dockerfile"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def steps(file: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions as scripts/run-dockerfile reads them."""
    return run_dockerfile().steps((DEPLOY / file).read_text())


def image_words(file: str, instruction: str) -> list[str]:
    (found,) = [yaml.safe_load(rest) for name, rest in steps(file) if name == instruction]
    return found


@pytest.mark.parametrize("file", ["systemd.service", "kubernetes/deployment.yaml"])
def test_the_command_is_one_of_ours(file: str) -> None:
    text = re.sub(r"#.*", "", (DEPLOY / file).read_text())
    (command,) = re.findall(r'(?:bin/|command: \["?)minisgl"?,? (.*--log-format.*)', text)
    words = re.sub(r'[",\]]|\$MINISGL_FLAGS', " ", command).replace("$(MODEL)", "demo").split()
    config, _ = parse_args(words)
    assert config.log_format == "json"
    assert config.shutdown_timeout < 40


@pytest.mark.parametrize("file", DOCKERFILES)
def test_an_image_starts_the_server_for_all_addresses(file: str) -> None:
    program, *flags = image_words(file, "ENTRYPOINT")
    assert program == "minisgl"
    config, _ = parse_args([*flags, *image_words(file, "CMD")])
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize("file", DOCKERFILES)
def test_copied_files_exist_and_suffice(file: str) -> None:
    copied = [shlex.split(rest)[:-1] for name, rest in steps(file) if name == "COPY" and "--from" not in rest]
    sources = {source for words in copied for source in words}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert sources >= {"pyproject.toml", "README.md", "LICENSE", "csrc", "python"}, "what pip needs to install it"


def test_packages_of_the_system_are_not_installed_by_the_script(tmp_path: Path) -> None:
    tree = run_dockerfile().Tree(tmp_path)
    tree.step("RUN", "apt-get --version > apt && touch apt")
    assert list(tmp_path.iterdir()) == []
    tree.step("RUN", "touch file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_compose_serves_its_image_and_mounts_what_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["minisgl"]
    file = Path(server["build"]["dockerfile"])
    assert file.name in DOCKERFILES
    config, _ = parse_args([*image_words(file.name, "ENTRYPOINT")[1:], *server["command"]])
    assert config.shutdown_timeout < int(server["stop_grace_period"].rstrip("s"))
    mounts = [mount.split(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])]
    here = [mount for mount in mounts if mount.startswith(".")]
    assert len(here) == 3
    assert [mount for mount in here if not (DEPLOY / mount).exists()] == []
    assert set(mounts) - set(here) == set(compose["volumes"])

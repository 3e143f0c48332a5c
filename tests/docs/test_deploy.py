"""Commands in deploy/ are command lines of the server, and files that they mount are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl.cli import parse_args

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("file", ["compose.yaml", "systemd.service", "kubernetes/deployment.yaml"])
def test_the_command_is_one_of_ours(file: str) -> None:
    text = re.sub(r"#.*", "", (DEPLOY / file).read_text())
    (command,) = re.findall(r'(?:exec |bin/|command: \["?)minisgl"?,? (.*--log-format.*)', text)
    words = re.sub(r'[",\]]|\$MINISGL_FLAGS', " ", command).replace("$(MODEL)", "demo").split()
    config, _ = parse_args(words)
    assert config.log_format == "json"
    assert config.shutdown_timeout < 40


def test_what_compose_mounts_exists() -> None:
    mounts = re.findall(r"- (\.[\w./]*):/", (DEPLOY / "compose.yaml").read_text())
    assert len(mounts) == 4
    assert [mount for mount in mounts if not (DEPLOY / mount).exists()] == []

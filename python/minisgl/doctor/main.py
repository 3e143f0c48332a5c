"""The command line of `minisgl doctor`. The exit code is 0 if the default path works on this machine, else 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from minisgl.config import ConfigError, EngineConfig
from minisgl.doctor.checks import PACKAGES, State, examine, gpus, verdict, versions
from minisgl.engine.device import resolve_device
from minisgl.settings import add_flags, read_flags

PIPE_COLUMNS = 110
COLOURS = {State.WORKS: "green", State.ABSENT: "yellow", State.FAILS: "red"}


def main(argv: Sequence[str]) -> int:
    """Examine this machine and print what was found."""
    parser = argparse.ArgumentParser(
        prog="minisgl doctor",
        description="Tell what is installed, what works on this machine, and why something does not.",
    )
    add_flags(parser, EngineConfig, only=("device",))
    args = parser.parse_args(argv)
    try:
        config = EngineConfig(model_path="", **read_flags(args, EngineConfig))
    except ConfigError as error:
        parser.error(str(error))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)

    table = Table("installed", "version", "for", title="Packages", title_justify="left")
    for name, version in versions().items():
        table.add_row(name, version or "[yellow]not installed[/]", PACKAGES.get(name, ""))
    console.print(table)
    for line in gpus() or ["no GPU that torch can use"]:
        console.print(line)

    try:
        device = resolve_device(config)
    except ConfigError as error:
        console.print(f"[red]{error}[/]")
        return 1
    findings = []
    table = Table("part", "state", "seconds", "remark", title=f"On {_name(device)}", title_justify="left")
    for finding in examine(device):
        findings.append(finding)
        state = f"[{COLOURS[finding.state]}]{finding.state}[/]"
        table.add_row(finding.part, state, f"{finding.seconds:.2f}" if finding.seconds else "", finding.remark)
    console.print(table)
    why = verdict(findings, device)
    console.print("[green]The default path works.[/]" if why is None else f"[red]{why}[/]")
    return 0 if why is None else 1


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)

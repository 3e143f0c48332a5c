"""The command line of `minisgl doctor`. The exit code is 0 if the default path works on this machine, else 1."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.doctor.checks import PACKAGES, State, examine, gpus, verdict, versions
from minisgl.engine.device import resolve_device
from minisgl.settings import add_flags, read_flags
from minisgl.tables import Color, colored, table

COLORS: dict[State, Color] = {State.WORKS: "green", State.ABSENT: "yellow", State.FAILS: "red"}


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

    packages = [(name, version or "not installed", PACKAGES.get(name, "")) for name, version in versions().items()]
    print(*table(("package", "version", "for"), packages, left=3), "", sep="\n")
    print(*gpus() or ["no GPU that torch can use"], "", sep="\n")

    try:
        device = resolve_device(config)
    except ConfigError as error:
        print(colored(str(error), "red"))
        return 1
    findings = list(examine(device))
    rows = [(one.part, one.state, f"{one.seconds:.2f}" if one.seconds else "", one.remark) for one in findings]
    header, rule, *lines = table((f"on {_name(device)}", "state", "seconds", "remark"), rows, left=4)
    colors = [COLORS[one.state] for one in findings]
    print(header, rule, *map(colored, lines, colors), "", sep="\n")
    why = verdict(findings, device)
    print(colored("The default path works.", "green") if why is None else colored(why, "red"))
    return 0 if why is None else 1


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)

"""Command line of `minisgl doctor`, also `python -m minisgl.doctor`: prints packages, GPUs and findings.

The exit code is 0 if the default path works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from minisgl.attention.backend_choice import TESTED
from minisgl.config import ConfigError, EngineConfig
from minisgl.config.settings import add_flags, read_flags
from minisgl.doctor.findings import State, examine, verdict
from minisgl.engine.device import resolve_device
from minisgl.tables import Color, colored, table

PACKAGES = {
    "minisgl": "",
    "torch": "",
    "transformers": "",
    "sglang-kernel": "attention fa",
    "flashinfer-python": "attention fi",
    "cuda-core": "kernels of csrc/",
    "cuda-bindings": "kernels of csrc/",
    "nvidia-cuda-nvrtc": "kernels of csrc/",
}
DRIVER_FILE = Path("/proc/driver/nvidia/version")
COLORS: dict[State, Color] = {State.WORKS: "green", State.ABSENT: "yellow", State.FAILS: "red"}


def main(argv: Sequence[str]) -> int:
    """Examine this machine and print the findings."""
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


def versions() -> dict[str, str]:
    """Return versions of packages by name; "" where one is not installed."""
    found = {
        "Python": platform.python_version(),
        "NVIDIA driver": driver_version(DRIVER_FILE.read_text() if DRIVER_FILE.exists() else ""),
        "CUDA of torch": torch.version.cuda or "",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def driver_version(text: str) -> str:
    """Return the version that the driver reports; "" if there is none."""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ""


def gpus() -> list[str]:
    """Return a line for each GPU that torch sees."""
    lines = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        tested = "" if (about.major, about.minor) in TESTED else ", a generation that is not tested"
        lines.append(
            f"cuda:{index}: {about.name}, compute capability {about.major}.{about.minor}{tested}, "
            f"{about.multi_processor_count} multiprocessors, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Flags of the scripts that put load on a server over HTTP."""

from __future__ import annotations

import argparse

from measuring.statistics import Slo


def add_served_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags that say what a server serves, where it does not say so itself; return their group."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--model", metavar="NAME", help="name of the model in requests; none: the first that the server lists"
    )
    group.add_argument(
        "--context", type=int, metavar="TOKENS", help="context length; none: that of /v1/models, or 4096 if it has none"
    )
    group.add_argument(
        "--vocab",
        type=int,
        metavar="N",
        help="size of the vocabulary from which prompts are drawn; none: the server's, or 10000 if it is unknown",
    )
    group.add_argument(
        "--start-timeout", type=float, default=300, metavar="S", help="seconds that the server's start may take"
    )
    return group


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how requests are sent, and those of `add_slo_arguments`."""
    client = parser.add_argument_group("client")
    client.add_argument("--temperature", type=float, default=0.6, help="sampling temperature")
    client.add_argument("--seed", type=int, default=0, help="seed of arrivals, lengths and tokens")
    client.add_argument("--processes", type=int, default=1, metavar="N", help="processes of the load generator")
    client.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds that a request may take")
    add_slo_arguments(parser)


def add_slo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which answers are good."""
    slo = parser.add_argument_group("service level objectives")
    slo.add_argument("--slo-ttft", type=float, default=500, metavar="MS", help="longest time to the first token")
    slo.add_argument(
        "--slo-ttft-per-1k",
        type=float,
        default=250,
        metavar="MS",
        help="time added to --slo-ttft for each 1,000 prompt tokens",
    )
    slo.add_argument(
        "--slo-tpot", type=float, default=50, metavar="MS", help="longest mean time between an answer's tokens"
    )


def slo_of(args: argparse.Namespace) -> Slo:
    return Slo(args.slo_ttft, args.slo_ttft_per_1k, args.slo_tpot)

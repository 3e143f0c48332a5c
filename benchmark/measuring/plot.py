"""Plots of results. matplotlib is imported here only, and only when a plot is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from measuring.client import RequestRecord
from measuring.probe import Search
from measuring.report import cell_text
from measuring.statistics import FloatArray, LoadSummary, Spread

STYLE = {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}


def check_plotting() -> None:
    """SystemExit before a long measurement if its plot could not be made."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'minisgl[bench]'") from None


@contextmanager
def _figure(path: Path, columns: int) -> Iterator[Any]:
    with _grid(path, 1, columns) as axes:
        yield axes[0]


@contextmanager
def _grid(path: Path, rows: int, columns: int) -> Iterator[Any]:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False)
        yield axes
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def plot_bars(path: Path, values: Mapping[str, float], title: str, unit: str) -> None:
    """Draw a bar for each name."""
    with _figure(path, 1) as (axis,):
        bars = axis.bar(list(values), list(values.values()), color="tab:blue", width=0.6)
        axis.bar_label(bars, labels=[cell_text(value) for value in values.values()])
        axis.set(title=title, ylabel=unit)


def plot_latency(
    path: Path, decode_ms: Mapping[str, Mapping[int, float]], prefill_rates: Mapping[str, Mapping[int, float]]
) -> None:
    """Draw ms of a decode step by batch size, and prefill tokens per second by length, for each engine."""
    with _figure(path, 2) as (decode, prefill):
        for axis, engines in ((decode, decode_ms), (prefill, prefill_rates)):
            for name, values in engines.items():
                axis.plot(list(values), list(values.values()), "o-", label=name)
        decode.set(title="decode", xlabel="batch size", ylabel="ms per token", xscale="log")
        decode.set_ylim(bottom=0)
        prefill.set(title="prefill", xlabel="prompt tokens", ylabel="tokens/s", xscale="log")
        prefill.set_ylim(bottom=0)
        decode.legend()


def plot_loads(
    path: Path, names: Sequence[str], summaries: Sequence[LoadSummary], records: Sequence[Sequence[RequestRecord]]
) -> None:
    """Draw the distributions of one load, or percentiles over several."""
    with _figure(path, 3) as axes:
        if len(summaries) == 1:
            done = [record for record in records[0] if record.error is None]
            gaps = np.concatenate([np.diff(record.times) for record in done] or [np.empty(0)])
            _distribution(axes[0], "time to first token", [record.ttft for record in done])
            _distribution(axes[1], "time between tokens", gaps)
            _distribution(axes[2], "end to end", [record.end_to_end for record in done])
            return
        for axis, title, spreads in (
            (axes[0], "time to first token", [summary.ttft_ms for summary in summaries]),
            (axes[1], "time between tokens", [summary.tbt_ms for summary in summaries]),
            (axes[2], "end to end", [summary.end_to_end_ms for summary in summaries]),
        ):
            _percentiles(axis, title, names, spreads)


def _distribution(axis: Any, title: str, seconds: Any) -> None:
    values = np.sort(np.asarray(seconds, dtype=float)) * 1e3
    axis.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)))
    axis.set(title=title, xlabel="ms", ylabel="share")
    if len(values) and values[0] > 0 and values[-1] > 20 * values[0]:
        axis.set_xscale("log")


def _percentiles(axis: Any, title: str, names: Sequence[str], spreads: Sequence[Spread | None]) -> None:
    for percentile in ("p50", "p90", "p99"):
        axis.plot(names, [getattr(one, percentile) if one else np.nan for one in spreads], "o-", label=percentile)
    axis.set(title=title, ylabel="ms", yscale="log")
    axis.legend()


def plot_searches(path: Path, searches: Sequence[Search]) -> None:
    """Draw, by rate, the share within the objectives and percentiles of TTFT and TPOT: a row of plots a workload.

    Dotted lines are the wanted share and the objective for TPOT; that for TTFT differs from prompt to prompt. A probe
    that was stopped is a cross: its percentiles would be those of the answers that had ended, the short ones.
    """
    workloads = list(dict.fromkeys(search.workload for search in searches))
    servers = list(dict.fromkeys(search.server for search in searches))
    ticker: Any = importlib.import_module("matplotlib.ticker")
    with _grid(path, len(workloads), 3) as rows:
        for workload, (share, ttft, tpot) in zip(workloads, rows, strict=True):
            of_workload = [search for search in searches if search.workload == workload]
            rules = of_workload[0].rules
            highest = max((probe.rate for search in of_workload for probe in search.probes), default=1.0)
            for search in of_workload:
                color = f"C{servers.index(search.server)}"
                label = search.server if search.round == 1 else None
                judged = [(probe.rate, probe.summary, probe.stopped) for probe in search.probes if probe.summary]
                whole = {rate: summary for rate, summary, stopped in judged if not stopped}
                rates = sorted(whole)
                figures = [whole[rate] for rate in rates]
                share.plot(rates, [one.good_share * 100 for one in figures], "o-", color=color, label=label)
                share.plot(
                    [rate for rate, _, stopped in judged if stopped],
                    [summary.good_share * 100 for _, summary, stopped in judged if stopped],
                    "x",
                    color=color,
                )
                ttfts, tpots = [one.ttft_ms for one in figures], [one.tpot_ms for one in figures]
                for axis, spreads in ((ttft, ttfts), (tpot, tpots)):
                    for percentile, line in (("p50", "o-"), ("p99", "o--")):
                        values = [getattr(one, percentile) if one else np.nan for one in spreads]
                        named = f"{label} {percentile}" if label else None
                        axis.plot(rates, values, line, color=color, label=named, markersize=3)
            share.set(title=f"{workload}: within the objectives", ylabel="% of requests", ylim=(-3, 103))
            ttft.set(title=f"{workload}: time to first token", ylabel="ms", yscale="log")
            tpot.set(title=f"{workload}: time per output token", ylabel="ms", yscale="log")
            share.axhline(rules.share * 100, color="gray", linestyle=":")
            tpot.axhline(rules.slo.tpot_ms, color="gray", linestyle=":")
            for axis in (ttft, tpot):
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2.5, 0.5)))  # few on long axes
            for axis in (share, ttft, tpot):
                axis.set(xlabel="requests/s", xlim=(0, 1.05 * highest))
                axis.legend(fontsize=7)


def plot_gaps(path: Path, gaps: Mapping[str, FloatArray]) -> None:
    """Draw the share of gaps between tokens that are longer than so many milliseconds, for each policy."""
    with _figure(path, 1) as (axis,):
        for name, values in gaps.items():
            ordered = np.sort(values)
            axis.plot(ordered, 1 - np.arange(len(ordered)) / len(ordered), label=name)
        axis.set(title="gaps between tokens beside long prompts", xlabel="ms", ylabel="share of gaps that are longer")
        axis.set(xscale="log", yscale="log")
        axis.legend()


class _Bar(Protocol):
    """A span of a timeline, in microseconds."""

    @property
    def name(self) -> str: ...

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...


def plot_timelines(
    path: Path, timelines: Sequence[tuple[str, Sequence[_Bar], Sequence[tuple[str, _Bar]]]], steps: int = 3
) -> None:
    """Draw host and device in the last steps of each (title, host spans, named device spans), one below the other."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(len(timelines), 1, figsize=(13, 2.1 * len(timelines)), squeeze=False)
        names_of = [
            list(dict.fromkeys([*(span.name for span in host), *(name for name, _ in device)]))
            for _, host, device in timelines
        ]
        everywhere = dict.fromkeys(name for names in names_of for name in names)
        colors = {name: pyplot.get_cmap("tab20")(index % 20) for index, name in enumerate(everywhere)}
        for names, axis, (title, host, device) in zip(names_of, axes[:, 0], timelines, strict=True):
            launches = [span.begin for span in host if span.name == "launch"]
            begin, end = launches[-steps - 1], launches[-1]
            for row, spans in ((1, [(span.name, span) for span in host]), (0, device)):
                for name, span in spans:
                    if span.end > begin and span.begin < end:
                        axis.barh(row, span.end - span.begin, left=span.begin - begin, color=colors[name], height=0.7)
            axis.set(title=title, xlim=(0, end - begin), yticks=[0, 1], yticklabels=["device", "host"], xlabel="us")
            shown = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
            axis.legend(shown, names, fontsize=6, ncol=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        pyplot.close(figure)

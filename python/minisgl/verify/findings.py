"""Findings of a comparison as a verdict, a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minisgl.tables import colored, table
from minisgl.verify.compare import Parting, Position, Tolerance
from minisgl.verify.oracle import Answers, Expected
from minisgl.verify.ours import OurAnswers

Detokenize = Callable[[Sequence[int]], str]
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Beyond:
    """The first position of a prompt, in one pass, whose logits differ by more than rounding."""

    run: str
    logits: Position


@dataclass(frozen=True, slots=True)
class Apart:
    """The first token of a prompt, in one pass, at which the two engines part."""

    run: str
    parting: Parting
    near_tie: bool


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt over all passes; differences in standard deviations of the oracle's logits."""

    name: str
    prompt_tokens: int
    new_tokens: int
    compared: int  # positions over all passes
    cached: int  # prompt tokens found in the cache over all passes
    absolute: float
    largest: float
    rms: float
    rounding: float  # root mean square of transformers' logits minus others of its own, those in float32 if they fit
    limit: float  # on `rms`
    beyond: Beyond | None
    apart: list[Apart]

    @property
    def ok(self) -> bool:
        return self.compared > 0 and self.beyond is None and all(apart.near_tie for apart in self.apart)


@dataclass(frozen=True, slots=True)
class Report:
    tolerance: Tolerance
    prompts: list[PromptResult]
    layers: list[float]  # relative difference of what enters each layer
    is_float32: bool  # logits are compared with those in float32

    @property
    def ok(self) -> bool:
        return all(prompt.ok for prompt in self.prompts)

    @property
    def first_layer(self) -> str:
        """Name the part of the model after which the hidden states are first apart by more than rounding."""
        for index, difference in enumerate(self.layers):
            if not difference <= self.tolerance.rms:
                return "the embedding" if index == 0 else f"layer {index - 1}"
        return f"layer {len(self.layers) - 1}, the final norm or the head"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; a NaN, for an unknown logit, becomes null."""
        found: dict[str, Any] = _without_nan({"ok": self.ok, **asdict(self)})
        for prompt, result in zip(found["prompts"], self.prompts, strict=True):
            prompt["ok"] = result.ok
        found["parts_at"] = None if self.ok else self.first_layer
        return found


def judge(answers: Answers, ours: OurAnswers, tolerance: Tolerance, *, has_experts: bool = False) -> Report:
    """Compare the passes with the oracle's answers, prompt by prompt."""
    roundings = [expected.rounding for expected in answers.expected]
    # Rounding decides near ties of routers in any prompt. Two computations in the dtype share most of their rounding.
    if has_experts or not answers.is_float32:
        roundings = [max(roundings)] * len(roundings)
    prompts = []
    for index, expected in enumerate(answers.expected):
        limits = tolerance.at_least(roundings[index])
        runs = {name: runs[index] for name, runs in ours.passes.items()}
        positions = [
            (name, run.positions[position]) for name, run in runs.items() for position in sorted(run.positions)
        ]
        apart = [
            Apart(name, parting, parting.near_tie(limits))
            for name, run in runs.items()
            if (parting := run.parting(len(expected.prompt.tokens), expected.new_tokens, expected.logits))
        ]
        prompts.append(
            PromptResult(
                name=expected.prompt.name,
                prompt_tokens=len(expected.prompt.tokens),
                new_tokens=len(expected.new_tokens),
                compared=len(positions),
                cached=sum(run.cached_tokens for run in runs.values()),
                absolute=max((one.absolute for _, one in positions), default=0.0),
                largest=max((one.largest for _, one in positions), default=0.0),
                rms=max((one.rms for _, one in positions), default=0.0),
                rounding=expected.rounding,
                limit=limits.rms,
                beyond=next((Beyond(name, one) for name, one in positions if not one.within(limits)), None),
                apart=apart,
            )
        )
    return Report(tolerance, prompts, ours.layers, answers.is_float32)


def print_report(report: Report, answers: Answers, decode: Detokenize | None) -> None:
    """Print the table, then every place where the two part, then the verdict."""
    measure = "from transformers in float32" if report.is_float32 else "from transformers"
    print(f"distance of our logits {measure}, also in standard deviations")
    heading = ("prompt", "tokens", "cached", "compared", "largest", "/ std", "rms / std", "theirs", "limit", "equal")
    rows = []
    for prompt in report.prompts:
        equal = min((apart.parting.step for apart in prompt.apart), default=prompt.new_tokens)
        tie = " (near tie)" if prompt.apart and all(apart.near_tie for apart in prompt.apart) else ""
        row = (
            prompt.name,
            str(prompt.prompt_tokens),
            str(prompt.cached),
            str(prompt.compared),
            f"{prompt.absolute:.2g}",
            f"{prompt.largest:.2g}",
            f"{prompt.rms:.2g}",
            f"{prompt.rounding:.2g}" if prompt.rounding else "",
            f"{prompt.limit:.2g}",
            f"{equal}/{prompt.new_tokens}{tie}",
        )
        rows.append(row)
    top, rule, *lines = table(heading, rows)
    print(top, rule, sep="\n")
    for line, prompt in zip(lines, report.prompts, strict=True):
        print(line if prompt.ok else colored(line, "red"))
    for prompt, expected in zip(report.prompts, answers.expected, strict=True):
        for line in _places(prompt, expected, decode):
            print(line)
    if any(prompt.rounding for prompt in report.prompts):
        print("theirs: the distance of transformers' own logits in this dtype; twice that is the limit if it is more")
    if not report.is_float32:
        print("float32 found no room in memory: ours and theirs both round; theirs: between two ways to attend")
    limits = f"limits: rms {report.tolerance.rms:.2g}, largest {report.tolerance.largest:.2g}"
    if report.ok:
        print(colored(f"PASSED: every difference is within rounding ({limits})", "green"))
        return
    layers = ", ".join(f"{difference:.1g}" for difference in report.layers)
    print(f"hidden states before each layer differ by (relative): {layers}")
    print(colored(f"FAILED: beyond rounding ({limits}); the two part at {report.first_layer}", "red"))


def _places(prompt: PromptResult, expected: Expected, decode: Detokenize | None) -> list[str]:
    lines = []
    tokens = expected.tokens

    def context(end: int) -> str:
        """Return the end of the text before a position, or the ids."""
        return repr(decode(tokens[:end])[-SHOWN_CHARS:]) if decode else f"token ids {tokens[max(end - 8, 0) : end]}"

    def name(token: int) -> str:
        return f"{token} {decode([token])!r}" if decode else str(token)

    if prompt.beyond is not None:
        one = prompt.beyond.logits
        lines.append(
            f"{prompt.name} ({prompt.beyond.run} pass): logits differ beyond rounding from position {one.position} "
            f"(rms {one.rms:.2g}, largest {one.largest:.2g}), after {context(one.position + 1)}"
        )
    for apart in prompt.apart:
        parting = apart.parting
        reason = (
            "a near tie, within rounding"
            if apart.near_tie
            else "no near tie"
            if parting.is_our_best
            else "the sampler did not take the best of our logits"
        )
        lines.append(
            f"{prompt.name} ({apart.run} pass): tokens part at new token {parting.step}, "
            f"after {context(prompt.prompt_tokens + parting.step)}:\n"
            + "".join(
                f"    {side} {name(choice.token)}: logit {choice.ours:.6g} ours, {choice.theirs:.6g} transformers\n"
                for side, choice in (("ours        ", parting.ours), ("transformers", parting.theirs))
            )
            + f"    the margin of transformers is {parting.margin:.2g} standard deviations: {reason}"
        )
    return lines


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and value != value else value

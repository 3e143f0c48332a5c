"""Trains the demo model: python -m demo_model.train --out FOLDER (with tools/ on PYTHONPATH).

The run lasts a given number of minutes on whatever device there is; learning rate and context length follow
the clock, so a faster device simply sees more text. A checkpoint is kept in FOLDER/checkpoint.pt; the same
command with --resume goes on from there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo_model.batches import batches, longest_context
from demo_model.model import CONFIG, Model
from demo_model.muon import Muon

_WARM_UP, _COOL_DOWN = 0.01, 0.6  # parts of the training in which the learning rate rises and falls


@dataclass
class Trainer:
    """A model in training. `seconds` is the time trained so far, over all resumed runs."""

    model: Model
    device: torch.device
    minutes: float
    muon: Muon
    adam: torch.optim.AdamW
    base_rates: dict[str, float]
    steps: int = 0
    seconds: float = 0.0

    @property
    def progress(self) -> float:
        return min(self.seconds / (60 * self.minutes), 1.0)

    def set_learning_rate(self) -> None:
        share = learning_rate_share(self.progress)
        for name, optimizer in (("muon", self.muon), ("adam", self.adam)):
            for group in optimizer.param_groups:
                group["lr"] = self.base_rates[name] * share

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.steps, self.seconds = state["steps"], state["seconds"]


def learning_rate_share(progress: float) -> float:
    """Return the schedule's factor: it climbs from 0 to 1, stays, and falls to 0 at the end."""
    return max(0.0, min(1.0, (progress + 1e-3) / _WARM_UP, (1 - progress) / _COOL_DOWN))


def make_trainer(args: argparse.Namespace, device: torch.device) -> Trainer:
    torch.manual_seed(args.seed)
    model = Model(CONFIG | {"num_hidden_layers": args.layers}).to(device)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=args.lr_muon, weight_decay=args.weight_decay)
    adam = torch.optim.AdamW(others, lr=args.lr_adam, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")
    return Trainer(model, device, args.minutes, muon, adam, {"muon": args.lr_muon, "adam": args.lr_adam})


def train(trainer: Trainer, args: argparse.Namespace) -> None:
    """Steps until the time is over. The first step (which compiles) is not on the clock."""
    checkpoint = args.out / "checkpoint.pt"
    progress = torch.tensor(trainer.progress).share_memory_()  # type: ignore[no-untyped-call]
    stream = batches(f"{args.seed}/{trainer.steps}", args.tokens, progress, args.workers)
    loss_of = torch.compile(trainer.model.loss) if trainer.device.type == "cuda" else trainer.model.loss
    began = last = saved = time.monotonic()
    losses: list[torch.Tensor] = []
    waited = 0.0
    first = trainer.steps
    while trainer.progress < 1.0 and (args.steps is None or trainer.steps < args.steps):
        trainer.set_learning_rate()
        asked = time.monotonic()
        batch = next(stream).tensors(trainer.device)
        waited += time.monotonic() - asked
        with torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.device.type == "cuda"):
            loss = loss_of(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in (trainer.muon, trainer.adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        trainer.steps += 1
        if trainer.steps == first + 1:
            loss.item()
            print(f"first step after {time.monotonic() - began:.1f} s", flush=True)
            last, waited = time.monotonic(), 0.0
        if len(losses) < args.log_every:
            continue
        mean = torch.stack(losses).mean().item()  # waits for the device, so that the clock is right
        now = time.monotonic()
        trainer.seconds += now - last
        progress.fill_(trainer.progress)
        rate = len(losses) * args.tokens / (now - last)
        print(
            f"step {trainer.steps} {trainer.seconds:.0f} s loss {mean:.4f} {rate:.0f} tokens/s "
            f"waited {waited / (now - last):.0%} context {longest_context(trainer.progress)}",
            flush=True,
        )
        losses, last, waited = [], now, 0.0
        if now - saved > args.save_every:
            torch.save(trainer.state(), checkpoint)
            saved = last = time.monotonic()
    torch.save(trainer.state(), checkpoint)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--minutes", type=float, default=7.0, help="length of the whole training")
    parser.add_argument("--steps", type=int, help="stop after this many steps, though time is left")
    parser.add_argument(
        "--tokens", type=int, default=65536, help="tokens of one step; at least 3072, the longest document"
    )
    parser.add_argument("--workers", type=int, default=14, help="processes that generate text")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="layers of the model")
    parser.add_argument("--lr-muon", type=float, default=0.02, help="largest learning rate of Muon")
    parser.add_argument("--lr-adam", type=float, default=3e-3, help="largest learning rate of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.05, help="weight decay of the matrices, by Muon")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the training text")
    parser.add_argument(
        "--log-every", type=int, default=50, help="steps between two lines of the log, with which the clock is read"
    )
    parser.add_argument("--save-every", type=float, default=120, help="seconds between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(args, device)
    print(json.dumps({"parameters": sum(p.numel() for p in trainer.model.parameters()), "device": str(device)}))
    if args.resume:
        trainer.load(torch.load(args.out / "checkpoint.pt", map_location=device))
    train(trainer, args)
    trainer.model.save(args.out)


if __name__ == "__main__":
    main()

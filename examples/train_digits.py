"""Trains a small classifier on scikit-learn's handwritten digits twice, unpatched and patched, from the same seed.

    python examples/train_digits.py [--epochs 30] [--precision bf16-mixed] [--device auto|cpu|cuda] [--short]

The model below is written as models are written, with no thought of fusion. The second run differs in one line: the
`FusedLayers` callback. Then it compares accuracies, outputs and step times, and passes a safetensors checkpoint from
the patched model to the unpatched one and back. Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.lightning import FusedLayers

ENOUGH = 0.97
SEED = 0
console = Console()


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, width: int, dropout: float = 0.3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm(x)))))


class Classifier(nn.Module):
    """No convolution: an 8x8 image is 64 numbers."""

    def __init__(self, width: int = 128, depth: int = 3):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, width, bias=False), nn.BatchNorm1d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.stem(x)))
        return self.head(F.silu(self.fc(x)))


class Digits(pl.LightningModule):
    def __init__(self, steps: int):
        super().__init__()
        self.model = Classifier()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        noisy = images + 0.2 * torch.randn_like(images)
        loss = F.cross_entropy(self(noisy), labels, label_smoothing=0.1)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepTimer(Callback):
    """Wall time of each training step, the device's work included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.began = self._now(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.seconds.append(self._now(trainer) - self.began)

    @staticmethod
    def _now(trainer: pl.Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def milliseconds(self) -> tuple[float, float, float]:
        """First decile, median and last decile, without the first steps, in which kernels are built."""
        deciles = statistics.quantiles(self.seconds[len(self.seconds) // 5 :], n=10)
        return 1e3 * deciles[0], 1e3 * deciles[4], 1e3 * deciles[8]


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8x8 pixels that come with scikit-learn: a quarter for the test, always the same one."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, stratify=labels, random_state=SEED)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in parts)
    return TensorDataset(train_x.float(), train_y), TensorDataset(test_x.float(), test_y)


class Run(NamedTuple):
    module: Digits
    accuracy: float
    timer: StepTimer


def train(args: argparse.Namespace, patched: bool) -> Run:
    """One run, always from the same seed."""
    pl.seed_everything(SEED, verbose=False)
    train_set, test_set = load()
    batches = DataLoader(train_set, 64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(SEED))
    module, timer = Digits(args.epochs * len(batches)), StepTimer()
    progress = TQDMProgressBar(refresh_rate=1 if sys.stderr.isatty() else len(batches))
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator={"cpu": "cpu", "cuda": "gpu"}[args.device],
        devices=1,
        precision=args.precision,
        callbacks=[timer, progress, *([FusedLayers(report=False)] if patched else [])],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)
    accuracy = trainer.test(module, DataLoader(test_set, len(test_set)), verbose=False)[0]["accuracy"]
    return Run(module.to(args.device).eval(), accuracy, timer)


@torch.no_grad()
def outputs(module: nn.Module, images: Tensor) -> Tensor:
    return module(images.to(next(module.parameters()).device)).double().cpu()


def round_trip(patched: Digits, images: Tensor) -> tuple[float, float]:
    """Patched -> safetensors -> unpatched -> safetensors -> patched.

    Gives the largest difference of outputs between fused and original layers on the same weights, and the rounding
    such a difference is made of: that of the original in float32 against float64. Raises where a key, a dtype or a
    bit of the weights differs.
    """
    device = next(patched.parameters()).device
    original = Digits(patched.steps).to(device).eval()
    again = fl.patch_model(Digits(patched.steps).to(device).eval())
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "patched.safetensors"), Path(folder, "unpatched.safetensors")
        save_file(patched.state_dict(), first)
        original.load_state_dict(load_file(first))
        save_file(original.state_dict(), second)
        again.load_state_dict(load_file(second))
        if first.read_bytes() != second.read_bytes():
            raise SystemExit("the two checkpoints differ")
    if not torch.equal(outputs(again, images), outputs(patched, images)):
        raise SystemExit("outputs changed on the way to the unpatched model and back")
    expected = outputs(original, images)
    exact = outputs(original.double(), images.double())
    return (outputs(patched, images) - expected).abs().max().item(), (expected - exact).abs().max().item()


def table(args: argparse.Namespace, runs: dict[str, Run]) -> Table:
    made = Table("", *runs, title=f"{args.epochs} epochs on {where(args.device)}, {args.precision}, seed {SEED}")
    times = [run.timer.milliseconds() for run in runs.values()]
    made.add_row("test accuracy", *(f"{run.accuracy:.2%}" for run in runs.values()))
    made.add_row("training step, median", *(f"{median:.2f} ms" for _, median, _ in times))
    made.add_row("80% of the steps", *(f"{low:.2f} to {high:.2f} ms" for low, _, high in times))
    return made


def where(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--precision", default="32-true", help="as Lightning names it: bf16-mixed, 16-mixed, ...")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--short", action="store_true", help="as few epochs as still reach the accuracy")
    args = parser.parse_args(argv)
    if args.short:
        args.epochs = min(args.epochs, 15)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for about in ("does not have many workers", "LeafSpec"):
        warnings.filterwarnings("ignore", f".*{about}.*")
    torch.set_num_threads(1)  # on layers this small, threads wait for each other longer than they work
    images = load()[1].tensors[0]

    runs: dict[str, Run] = {}
    for name in ("unpatched", "patched"):
        console.rule(f"[bold]{name}")
        runs[name] = train(args, patched=name == "patched")
    unpatched, patched = (run.module for run in runs.values())

    console.rule("[bold]what was fused")
    say(str(fl.explain(patched)))
    console.rule("[bold]what it comes to")
    console.print(table(args, runs))
    if kernels.interpreted():
        say("The patched run went through Triton's interpreter: it checks results, and says nothing of speed.")
    elif args.device == "cpu":
        say(
            "On a CPU both compute with PyTorch's own operators: there is no time to gain here, and results must agree."
        )
    else:
        say("Layers this small keep the host busy, not the device; benchmarks/ has larger ones.")
    difference, rounding = round_trip(patched, images)
    apart = (outputs(patched, images) - outputs(unpatched, images)).abs().max().item()
    say(f"Same weights, fused and original layers: outputs differ by {difference:.2g}, rounding is {rounding:.2g}.")
    say(f"The two models, each after its own training: outputs differ by {apart:.2g}.")
    say("Checkpoint: patched -> safetensors -> unpatched -> safetensors -> patched, equal to the last bit.")

    failed = [f"{name} reached {run.accuracy:.2%}" for name, run in runs.items() if run.accuracy < ENOUGH]
    if difference > 4 * rounding:
        failed.append(f"outputs differ by {difference:.2g}, more than rounding ({rounding:.2g}) allows")
    for line in failed:
        console.print(f"[bold red]Failed:[/] {line}")
    return 1 if failed else 0


def say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())

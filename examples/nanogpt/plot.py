"""Draws OUT_DIR/loss.png from OUT_DIR/metrics.jsonl: the loss against the unigram baseline.

python plot.py --out_dir=out/quickstart
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from config import UserError, key, parse, run_script
from report import NAME, read_metrics


@dataclass
class PlotSettings:
    out_dir: str = key("out/nanogpt", "folder with metrics.jsonl")


def plot(folder: Path) -> Path:
    """Write and return the picture's path. Raises: UserError if there is nothing to draw."""
    records = read_metrics(folder / NAME)
    if not records:
        raise UserError(f"{folder / NAME}: no metrics to draw")
    # No pyplot: it would look for a display and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss (nats per character)")
    axes.plot([r["iter"] for r in records], [r["loss"] for r in records], label="training")
    evaluated = [r for r in records if r.get("val_loss") is not None]
    if evaluated:
        steps, values = [r["iter"] for r in evaluated], [r["val_loss"] for r in evaluated]
        axes.plot(steps, values, "o-", label="validation")
        baseline = evaluated[-1]["unigram_baseline"]
        axes.axhline(baseline, linestyle="--", color="gray", label=f"unigram, {baseline:.2f}")
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path


def main(arguments: list[str]) -> int:
    print(plot(Path(parse(PlotSettings, arguments).out_dir)))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "plot.py"))

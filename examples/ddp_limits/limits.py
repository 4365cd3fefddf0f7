"""Measures, step by step, what makes a model fit that DDP alone has no room for.

    python limits.py                                             # a small model on two CPU ranks
    python limits.py --n_layer=12 --n_embd=768 --steps=baseline,recompute,fsdp

Each step runs in processes of its own. Prints a table, and leaves it in OUT_DIR/limits.json and as
a picture in OUT_DIR/limits.png. A step that fails, for want of memory too, is a row that says so.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import measure
from borrowed import UserError, parse, run_script
from steps import LimitSettings, Step, arguments, check, find

#: glibc keeps what is freed, and a limit counts that; so it gives pages back at once, slowly.
FRUGAL = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
ROW = "{:<26} {:>12} {:>12} {:>10} {:>9}"


def run(settings: LimitSettings, step: Step) -> dict:
    """The row of one step: what measure.py printed, or {"step": ..., "failed": why}."""
    launcher = ["-m", "libddp.run", "--standalone", f"--nproc-per-node={settings.ranks}"]
    one = arguments(replace(settings, steps=(step.name,)))
    process = subprocess.Popen(
        [sys.executable, *launcher, measure.__file__, *one],
        env=os.environ | (FRUGAL if settings.limit_mib else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=settings.seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        process.communicate()
        return {"step": step.name, "failed": f"took longer than {settings.seconds:g} s"}
    for line in output.splitlines():
        if line.startswith(measure.MARK):
            return json.loads(line.removeprefix(measure.MARK))
    return {"step": step.name, "failed": reason(output, process.returncode)}


#: A rank's own words, what says most first.
TELLING = (
    r": error: (.+)",
    r"(DefaultCPUAllocator: [^.\n]+)",
    r"(CUDA out of memory[^\n]+)",
    r"(\b(?!ChildFailed)\w+Error: .+)",
)


def reason(output: str, status: int) -> str:
    """Why it failed, in a line; launchers write many that do not say it."""
    for words in TELLING:
        if found := re.search(words, output):
            return found[1].strip()[:120]
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (lines or [f"exit status {status}"])[-1][:120]


def describe(row: dict) -> str:
    words = find(row["step"]).words
    if "failed" in row:
        return f"{words:<26} failed: {row['failed']}"
    added, peak = f"{row['added_mib']:.0f} MiB", f"{row['peak_mib']:.0f} MiB"
    return ROW.format(words, added, peak, f"{row['ms']:.0f} ms", f"{row['last_loss']:.4f}")


def plot(rows: list[dict], path: Path) -> None:
    """Two rows of bars: memory and time of each step that ran."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "failed" not in row]
    names = [find(row["step"]).words for row in rows]
    figure = Figure(figsize=(8, 1.5 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    shown = {"added_mib": "memory of a rank (MiB)", "ms": "time of an iteration (ms)"}
    for axis, (key, label) in zip(axes, shown.items(), strict=True):
        bars = axis.barh(names, [row[key] for row in rows])
        axis.bar_label(bars, fmt="{:.0f}", padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.2)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


def main(given: list[str]) -> int:
    settings = check(parse(LimitSettings, given))
    out, rows = Path(settings.out_dir), []
    print(f"{settings.ranks} ranks; memory that training adds to a rank, and its peak in all:")
    print(ROW.format("step", "added", "peak", "iteration", "loss"), flush=True)
    for name in settings.steps:
        rows.append(run(settings, find(name)))
        print(describe(rows[-1]), flush=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        result = {"settings": asdict(settings), "rows": rows}
        (out / "limits.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
        if settings.plot:
            plot(rows, out / "limits.png")
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "limits.py"))

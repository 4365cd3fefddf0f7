"""Draws the loss over wall time, and how many ranks there were, with the events marked.

draw(record.lines, costs, began, Path("out/elastic/loss.png"))
"""

from pathlib import Path

from record import Cost, Line, curve


def draw(lines: list[Line], costs: list[Cost], began: float, path: Path) -> None:
    """`began`: the time that is 0 in the picture."""
    # No pyplot: it would look for a display and keep global state.
    from matplotlib.figure import Figure

    points = [(time - began, ranks, loss) for time, ranks, loss in curve(lines)]
    figure = Figure(figsize=(11, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    above.set_ylabel("loss (nats per character)")
    above.plot([p[0] for p in points], [p[2] for p in points], ".", markersize=3)
    below.set(xlabel="seconds", ylabel="ranks", yticks=(0, 1, 2))
    below.plot([p[0] for p in points], [p[1] for p in points], ".", markersize=3, color="tab:green")
    for number, cost in enumerate(costs):
        at = cost.at - began
        for axes in (above, below):
            end = at + cost.seconds
            axes.axvspan(end - cost.pause, end, color="tab:red", alpha=0.15, linewidth=0)
            axes.axvline(at, color="tab:red", linewidth=0.8)
        note = f"{cost.event}\n{cost.pause:.1f} s, {cost.lost} steps lost"
        place = {"xytext": (3, -3), "textcoords": "offset points", "va": "top", "rotation": 90}
        height = 1 - 0.35 * (number % 2)  # so that notes of events close together stay apart
        above.annotate(
            note, (at, height), xycoords=above.get_xaxis_transform(), fontsize=8, **place
        )
    above.grid(alpha=0.3)
    figure.savefig(path, dpi=120)

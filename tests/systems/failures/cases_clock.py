"""Wall clocks that are wrong, or jump: without effect, for nothing decides by them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from failures.case import case
from failures.fleet import Fleet
from failures.work_clock import SHORT_S

SOURCE = Path(__file__).with_name("wall_clock.c")


def build_clock(folder: Path) -> str:
    library = folder / "wall_clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True, timeout=60
    )
    return str(library)


@case("clock", "wall clocks 2 h apart, and jumping: error of a timeout", bound_s=1.0, short=1,
      full=10)  # fmt: skip
def skewed_clocks(bench, trials):
    """How much later or earlier than asked a timeout came."""
    library = build_clock(bench.fleet.folder)
    with Fleet(bench.network, env={"LD_PRELOAD": library}) as fleet:
        for _ in range(trials):
            run = fleet.start("failures.work_clock", "join_and_jump", hosts=[0] * 3)
            for outcome in run.finish():
                assert outcome.error is None, outcome
                assert outcome.status == 0, outcome
                assert abs(outcome.value["skew_s"] - outcome.value["asked_s"]) < 60, outcome
                yield abs(outcome.value["waited_s"] - SHORT_S)

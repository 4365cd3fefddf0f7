"""examples/elastic: what an event has cost, and one act of the demo as a user starts it."""

import json
import os
import subprocess
import sys

import pytest
from example_modules import load

elastic = load("elastic")
TINY = "n_layer=1,n_embd=32,batch_size=2,block_size=16"


def line(time, start, rank, step, losses, world=2):
    texts = {part: loss.hex() for part, loss in losses.items()}
    return {"time": time, "start": start, "pid": start + rank, "rank": rank} | {
        "world": world,
        "step": step,
        "losses": texts,
    }


def write(folder, lines):
    with open(folder / elastic.record.STEPS, "a") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)


@pytest.mark.parametrize("again", [0.25, 0.25 + 2**-20])
def test_the_cost_of_an_event(tmp_path, again):
    record = elastic.record.Record(tmp_path)
    write(tmp_path, [line(s, 100, r, s, {str(r): 1 / s}) for s in (1, 2, 3, 4) for r in (0, 1)])
    event = elastic.record.Event("killed", 4.5, frozenset({100}))
    assert record.since(event) == []
    # Another number of ranks repeats step 4, and rank 0's part of it with what is given.
    write(tmp_path, [line(6.0, 200, 0, 4, {"0": again, "1": 0.25}, world=1)])
    write(tmp_path, [line(6.5, 200, 0, 5, {"0": 0.2, "1": 0.2}, world=1)])
    with open(tmp_path / elastic.record.STEPS, "a") as file:
        file.write('{"time": 7')  # it is being written
    cost = record.cost_of(event)
    assert (cost.seconds, cost.pause, cost.step, cost.ranks) == (1.5, 2.0, 4, 1)
    assert (cost.lost, cost.repeated, cost.equal) == (1, 2, again == 0.25)
    assert elastic.demo.words(cost) == ("yes" if again == 0.25 else "NO")
    points = elastic.record.curve(record.lines)
    assert [(time, ranks) for time, ranks, _ in points][-2:] == [(6.0, 1), (6.5, 1)]
    assert len(points) == 6


def test_an_act_that_there_is_not(tmp_path):
    with pytest.raises(elastic.shared.UserError, match="--acts: there is no act 'keeper'; there"):
        elastic.demo.main(["--acts=keeper", f"--out_dir={tmp_path}"])


def test_a_worker_is_killed_and_the_losses_are_as_if_it_had_not_been(tmp_path):
    """Compared with a training on one rank that nothing happens to, too."""
    pytest.importorskip("matplotlib")
    demo, out = elastic.folder / "demo.py", tmp_path / "out"
    command = [sys.executable, demo, f"--out_dir={out}", "--acts=worker", "--calm=0.5"]
    command += ["--compare=True", f"--train={TINY}"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "demo.json").read_text())
    (event,) = found["events"]
    assert (event["event"], event["ranks"]) == ("a worker is killed", 2)
    assert 0 <= event["lost"] <= 5  # snapshots are five steps apart
    assert event["equal"]
    assert found["different_from_undisturbed"] == 0
    assert event["step"] < found["steps"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "run.key").exists()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=30).stdout
    run = (out / "snapshots" / "run").read_text().strip()
    assert not any("libddp-keeper" in each and run in each for each in left.splitlines())

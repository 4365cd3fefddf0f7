"""A script with DLRover's calls, of which only `dlrover.trainer.torch` becomes `libddp`."""

from pathlib import Path

from launches import finish, launch, ranks

SCRIPT = Path(__file__).with_name("scripts") / "nanogpt_calls.py"
NUM_SAMPLES = 53
SAVE_INTERVAL = 2


def start(folder, num_ranks, run, *options):
    script = folder / "train.py"
    script.write_text(SCRIPT.read_text().replace("dlrover.trainer.torch", "libddp"))
    where = [f"--checkpoint={folder / 'checkpoint.pt'}", f"--notes={folder / run}"]
    [(status, output)] = finish(
        launch([*ranks(num_ranks, forked=num_ranks > 1), script, *where, *options], folder),
        deadline=180,
    )
    return status, output


def trained(folder, run, last_step):
    """(epoch, sample) of each rank's steps up to one."""
    found = []
    for notes in folder.glob(f"{run}-*"):
        for line in notes.read_text().splitlines():
            step, epoch, *samples = map(int, line.split())
            if step <= last_step:
                found += [(epoch, sample) for sample in samples]
    return found


def test_killed_trainings_see_every_sample_once_in_each_epoch(tmp_path):
    found, saved = [], 0
    # Into the second epoch; the step counter goes on, over other batch sizes too.
    for run, (num_ranks, die_at) in enumerate([(2, 7), (1, 13), (3, 16)]):
        options = [f"--die_at={die_at}", "--num_workers=2", f"--batch_size={2 + run}"]
        status, output = start(tmp_path, num_ranks, f"killed{run}", *options)
        assert status != 0
        assert "Model device cpu" in output
        before, saved = saved, die_at - die_at % SAVE_INTERVAL
        assert len(trained(tmp_path, f"killed{run}", saved)) > num_ranks * (saved - before)
        found += trained(tmp_path, f"killed{run}", saved)
    status, output = start(tmp_path, 2, "last", "--num_workers=2")
    assert status == 0, output
    assert "validated on 9" in output
    found += trained(tmp_path, "last", 1000)
    for epoch in range(2):
        samples = [sample for e, sample in found if e == epoch]
        assert set(samples) == set(range(NUM_SAMPLES))
        assert len(samples) - NUM_SAMPLES < 3  # padding of at most three ranks

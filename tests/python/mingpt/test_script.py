"""main.py as a user starts it: what it leaves, and mistakes as one line."""

import killed_once
import pytest
import torch
from launches import ranks
from mingpt_runs import SCRIPT, TINY, UserError, config, losses, mingpt, places, script, train


def test_alone_and_the_files_it_leaves(tmp_path, text_file):
    status, output = script(tmp_path, [], *places(text_file, "run/s.pt"))
    assert status == 0, output
    assert losses(output) == [
        pytest.approx(pair, abs=1e-5) for pair in train(text_file, tmp_path / "one.pt")
    ]
    left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"text.txt", "one.pt", "run/s.pt"}


def test_a_mistake_is_one_line(tmp_path):
    status, output = script(tmp_path, [], *places("nowhere.txt", "s.pt"))
    assert status == 1
    (line,) = output.splitlines()
    assert line.startswith("main.py: error: cannot read the corpus data_config.path=nowhere.txt: ")
    assert " Hint: " in line


def test_a_mistake_of_rank_0_ends_all_ranks_with_its_message(tmp_path, text_file):
    status, output = script(tmp_path, ranks(2), *places(text_file, text_file / "s.pt"))
    assert status == 1
    assert f"): cannot write the snapshot {text_file}/s.pt: " in output
    assert "PeerError" not in output
    assert "epoch" not in output


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (9, r"batch_size=9 \(of all ranks together\) cannot be shared by 2 ranks\. Hint: "),
        (400, r"batch_size=400 is more than the \d+ samples of a data set\. Hint: "),
    ],
)
def test_a_batch_size_that_cannot_be(text_file, size, message):
    made = config(f"data_config.path={text_file}", f"trainer_config.batch_size={size}")
    sets = mingpt.char_dataset.load(made.data_config)
    two = mingpt.ranks.Ranks(0, 2, torch.device("cpu"), distributed=False)
    with pytest.raises(UserError, match=message):
        mingpt.trainer.Trainer(made.trainer_config, made.optimizer_config, None, *sets, two)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_device_that_is_not_there():
    with pytest.raises(UserError, match=r"trainer_config.device=cuda: there is no such device"):
        mingpt.ranks.join("cuda")


def test_a_worker_that_is_killed_costs_less_than_an_interval(tmp_path, text_file):
    keys = [*TINY, *places(text_file, "s.pt"), "gpt_config.resid_pdrop=0.1"]
    keys += ["trainer_config.snapshot_every=3", "trainer_config.snapshot_storage=6"]
    keys += ["trainer_config.max_epochs=1", "trainer_config.data_loader_workers=1"]
    output = killed_once.run(tmp_path, SCRIPT, "trainer.Trainer._step", 9, keys)
    assert "resuming snapshots at step 6 of epoch 1" in output, output
    for pairs in killed_once.repeated(tmp_path, start=6):
        assert len(pairs) >= 1
        assert all(first == again for first, again in pairs), pairs
    stored = sorted(
        int(path.name[5:].split(".")[0])
        for path in (tmp_path / "snapshots").iterdir()
        if path.name.startswith("step-")
    )
    assert len(stored) == 2
    # What waits behind a slow disk is replaced by the next save.
    assert stored[-1] >= 24
    assert all(step % 3 == 0 for step in stored)
    # Sums over the epoch have gone on, too: the same means as of a run that was never cut.
    (tmp_path / "whole").mkdir()
    status, whole = script(tmp_path / "whole", ranks(2, forked=True), *keys)
    assert status == 0, whole
    assert losses(whole) == losses(output)

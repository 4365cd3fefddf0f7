"""main.py as a user starts it: what it leaves, and mistakes as one line."""

import pytest
import torch
from launches import ranks
from mingpt_runs import UserError, config, losses, mingpt, places, script, train


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

"""main.py on several ranks: under both launchers, and on two nodes.

Ranks add up in another order than one rank does, so losses agree up to rounding, which training
makes larger: 1e-3 is what is promised, for runs without dropout.
"""

import pytest
import torch.distributed as dist
from launches import finish, launch, ranks
from mingpt_runs import SCRIPT, TINY, losses, places, script, train


@pytest.mark.parametrize(
    ("number", "launcher"),
    [(4, "libddp.run"), (2, "torch.distributed.run")],
    ids=["libddp-4", "torchrun-2"],
)
def test_the_same_losses_on_any_number_of_ranks(tmp_path, text_file, number, launcher):
    one = train(text_file, tmp_path / "one.pt")
    status, output = script(
        tmp_path,
        ranks(number, launcher, forked=number > 2),
        *places(text_file, tmp_path / "several.pt"),
    )
    assert status == 0, output
    several = losses(output)
    assert len(several) == len(one) == 2
    for a, b in zip(several, one, strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert output.count("saved") == 2


def test_two_nodes_on_one_host(tmp_path, text_file):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = ["-m", "libddp.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    launcher += [f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0"]
    launcher += ["--rdzv-id=mingpt", "--local-addr=127.0.0.1"]
    command = [*launcher, SCRIPT, *TINY, *places(text_file, tmp_path / "nodes.pt")]
    results = finish(launch(command, tmp_path), launch(command, tmp_path))
    output = "".join(text for _, text in results)
    assert [status for status, _ in results] == [0, 0], output
    one = train(text_file, tmp_path / "one.pt")
    for a, b in zip(losses(output), one, strict=True):
        assert a == pytest.approx(b, rel=1e-3)

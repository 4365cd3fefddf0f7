"""Tutorial scripts that name only torch give torch's numbers, to the bit, on libddp."""

import drop_in
import pytest
import torch.distributed as dist

CASES = {
    "resume": ["multigpu_torchrun.py", "4"],
    "file": ["ddp_example.py", "--init-method=file://{folder}/meeting"],
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_losses(case, tmp_path):
    script, *arguments = CASES[case]
    drop_in.verify(*drop_in.both(script, tmp_path, *arguments))


def test_the_variable_reaches_ranks_that_the_script_spawns(tmp_path):
    theirs = drop_in.on_gloo(lambda name: spawned(tmp_path / name, "0"))
    drop_in.verify(theirs, spawned(tmp_path / "libddp", "1"))


def spawned(folder, value: str) -> list[dict]:
    """No launcher: this process hosts the store, so that the kernel can choose the port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LIBDDP_DROP_IN": value,
    }
    return drop_in.results((), "multigpu.py", folder, "2", **variables)

"""Language model scripts that name only torch give torch's numbers, to the bit, on libddp."""

import drop_in
import pytest


@pytest.mark.parametrize("script", ["nanogpt_train.py", "mingpt_trainer.py", "elastic_train.py"])
def test_the_same_losses(script, tmp_path):
    drop_in.verify(*drop_in.both(script, tmp_path))


def test_the_same_losses_after_a_failure_and_a_restart(tmp_path):
    """To the bit: torch's without a failure, libddp's without one, and libddp's with one."""
    script = "restarted_train.py"
    theirs, whole = drop_in.both(script, tmp_path, "whole")
    drop_in.verify(theirs, whole)
    launcher = (*drop_in.LIBDDP_RUN, "--max-restarts=1")
    restarted = drop_in.results(launcher, script, tmp_path / "restarted")
    assert restarted == whole
    assert [len(found["losses"]) for found in restarted] == [12, 12]

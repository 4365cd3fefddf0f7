"""Scripts for torch's FSDP, of both generations, give torch's losses on libddp."""

import drop_in
import pytest


@pytest.mark.parametrize("script", ["fsdp_train.py", "fsdp2_train.py"])
def test_the_same_losses(script, tmp_path):
    drop_in.verify_sharded(*drop_in.both(script, tmp_path))

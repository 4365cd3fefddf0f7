"""Language model scripts that name only torch give torch's numbers, to the bit, on libddp."""

import drop_in
import pytest


@pytest.mark.parametrize("script", ["nanogpt_train.py", "mingpt_trainer.py", "elastic_train.py"])
def test_the_same_losses(script, tmp_path):
    drop_in.verify(*drop_in.both(script, tmp_path))

"""Accelerate, Lightning and Transformers train on libddp, through torch's names."""

import drop_in
import pytest


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_the_same_losses(library, tmp_path):
    pytest.importorskip(library)
    drop_in.verify(*drop_in.both(f"{library}_train.py", tmp_path))

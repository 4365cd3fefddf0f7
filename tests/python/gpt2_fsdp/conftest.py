"""A small corpus, already converted, and the modules of the example."""

import pytest
from gpt2_runs import example, prepare
from lone_process import alone

__all__ = ["alone"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data_dir of numbers that follow from each other, so that there is something to learn."""
    return prepare(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def gpt2():
    """Every module of examples/gpt2_fsdp."""
    return example()

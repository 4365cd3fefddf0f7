"""Folders of snapshots: two of a sharded model of two ranks, and one of an earlier version."""

import shutil

import pytest
import ranks
import saved_runs
from libddp.__main__ import main


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """ "run": steps 5 and 7 of two ranks; "old": save_snapshot's of before."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(saved_runs.save, 2, str(folder))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the snapshots, to be damaged."""
    return shutil.copytree(saved / "run", tmp_path / "run")


@pytest.fixture
def command(capsys):
    """Runs `libddp snapshot`; returns its status, and what it printed."""

    def run(*arguments):
        capsys.readouterr()
        status = main(["snapshot", *map(str, arguments)])
        return status, capsys.readouterr()

    return run

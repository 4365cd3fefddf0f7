"""A script that nobody has launched is a group of one; one that was launched in part is not."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
{head}
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
print("world", dist.get_world_size(), "rank", dist.get_rank())
dist.destroy_process_group()
"""
SWAPPED = """
import libddp.distributed as dist
from libddp.nn.parallel import DistributedDataParallel as DDP
"""
DROP_IN = """
import libddp
libddp.install()
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""


def started(head, **variables):
    clean = {k: v for k, v in os.environ.items() if "RANK" not in k and "WORLD_SIZE" not in k}
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"):
        clean.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(head=head)],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("head", [SWAPPED, DROP_IN], ids=["swapped", "drop-in"])
def test_a_script_without_a_launcher(head):
    found = started(head)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "world 1 rank 0\n"
    assert found.stderr.count("this process is a group of one") == 1


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"SLURM_NTASKS": "4"}, "srun has started several processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started several processes"),
        ({"WORLD_SIZE": "2"}, "environment variable RANK is not set"),
        ({"MASTER_ADDR": "127.0.0.1"}, "environment variable RANK is not set"),
    ],
)
def test_a_script_that_is_not_alone(variables, text):
    found = started(SWAPPED, **variables)
    assert found.returncode == 1
    assert text in found.stderr

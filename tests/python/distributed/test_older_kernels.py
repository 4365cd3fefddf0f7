"""Linux before 5.3, and sandboxes that are like it: who dies is seen all the same."""

import re
import sys

import older_kernel
import pytest
from launches import finish, ranks, start

SCRIPT = """
import os, signal
import torch
import libddp
import libddp.distributed as dist
from libddp.nn.parallel import DistributedDataParallel as DDP

try:
    os.pidfd_open(os.getpid())
except OSError as error:
    print("pidfd_open:", error)
dist.init_process_group()
if dist.get_rank() == 0:  # tells whom it misses, and is not stopped before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
snapshot = libddp.Snapshot("run")
first = snapshot.load(model, optimizer).get("step", 0)
for step in range(first, 8):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    snapshot.save(step + 1, model, optimizer, extra={"step": step + 1})
    if first == 0 and step == 4 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"rank {dist.get_rank()} has gone from {first} to 8")
snapshot.close()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not older_kernel.IS_POSSIBLE, reason="its filter is for x86-64")
def test_a_killed_rank_is_started_again_and_goes_on_from_memory(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, older_kernel.__file__, sys.executable, *ranks(2)]
    ((status, output),) = finish(
        start([*command, "--max-restarts=1", "--shutdown-timeout=60", "train.py"], tmp_path)
    )
    assert status == 0, output
    assert "pidfd_open: [Errno 38]" in output
    missed = r"has failed: rank 1 \(pid \d+ on \S+\) died \(killed, crashed"
    assert re.search(missed, output), output
    assert "libddp run: restart 1 of 1; rank 1 was first: Signal 9 (SIGKILL)" in output
    for rank in range(2):
        assert f"rank {rank} has gone from 5 to 8" in output

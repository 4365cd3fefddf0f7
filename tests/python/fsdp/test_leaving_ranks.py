"""Parameters that a host's ranks have in common, when the one whose arena they lie in has left."""

import launches
import torch

#: Half of it is what a rank has under fully_shard. Bytes times four: more than a rank keeps of what
#: it frees (256 MiB) before the system gets it.
NUMEL = 75 << 20
#: One element of each page.
STEP = 1021

SCRIPT = f"""
import gc, time
from pathlib import Path
import torch
from libddp import distributed as ddp_dist
from libddp.distributed.fsdp import fully_shard

HERE = Path(__file__).parent

def wait_for(name):
    end = time.monotonic() + 120
    while not (HERE / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.02)

class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(({NUMEL},), 1.5))

ddp_dist.init_process_group("gloo")
model = fully_shard(Big())
ddp_dist.barrier()
if ddp_dist.get_rank() == 0:
    ddp_dist.destroy_process_group()
    del model
    gc.collect()
    (HERE / "left").touch()
    wait_for("checkpoint.pt")
else:
    wait_for("left")
    (weight,) = model.state_dict().values()
    torch.save(weight.to_local().flatten()[::{STEP}].clone(), HERE / "unfinished.pt")
    (HERE / "unfinished.pt").rename(HERE / "checkpoint.pt")
    ddp_dist.destroy_process_group()
"""


def test_a_checkpoint_written_after_the_owner_has_left(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ((status, output),) = launches.finish(
        launches.launch([*launches.ranks(2), script], tmp_path), deadline=180
    )
    assert status == 0, output
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved.numel() > NUMEL // 2 // STEP
    assert saved.eq(1.5).all(), f"{saved.ne(1.5).sum()} of {saved.numel()} pages are lost"

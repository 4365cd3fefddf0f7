"""`rejoin()` under `libddp run --in-place`: survivors keep model and optimizer.

Losses are those of a quiet run, to the bit.
"""

import json
import os
from pathlib import Path

import pytest
from launches import finish, launch

#: What is made once in a process lies outside of main(); rank 1 is killed in the first epochs.
TRAINING = """
import json, os, sys
import torch
import libddp
import libddp.distributed as dist
from libddp.distributed.fsdp import FullyShardedDataParallel, fully_shard
from libddp.nn.parallel import DistributedDataParallel
from libddp.optim import AdamW

kind, kills, steps = sys.argv[1], int(sys.argv[2]), 14
kept = {}  # of this process

def note(kind, *facts):
    line = [kind, int(os.environ["RANK"]), os.getpid(), libddp.elastic.info().epoch, *facts]
    with open("facts", "a") as file:
        file.write(json.dumps(line) + "\\n")

def net():
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 63), torch.nn.BatchNorm1d(63), torch.nn.Dropout(0.2)
    return torch.nn.Sequential(*layers, torch.nn.Linear(63, 4))

def hook(state, bucket):
    state.append(bucket.index())
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / 2)

def make():
    if kind.startswith("ddp"):
        model = DistributedDataParallel(net())
        if kind == "ddp-hook":
            kept["calls"] = []
            model.register_comm_hook(kept["calls"], hook)
        if kind == "ddp-sharded":
            return model, AdamW(model.parameters(), lr=0.01, shard_over=model)
    elif kind == "fsdp":
        model = FullyShardedDataParallel(net())
    else:
        model = net()
        fully_shard(model[0])
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def rejoin(model, optimizer):
    model.rejoin()
    if kind == "ddp-sharded":
        optimizer.rejoin()

@libddp.elastic.run
def main():
    info = libddp.elastic.info()
    dist.init_process_group()
    if "model" in kept:
        rejoin(kept["model"], kept["optimizer"])
    else:
        kept["model"], kept["optimizer"] = make()
    model, optimizer = kept["model"], kept["optimizer"]
    torch.manual_seed(dist.get_rank())
    snapshot = libddp.Snapshot("run", linger=5)
    state = snapshot.load(model, optimizer)
    if not state:  # what a failure before the first step goes back to
        snapshot.save(0, model, optimizer, extra={"step": 0})
        state = {"step": 0}
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd" in line or "/dev/shm" in line for line in maps)
    note("epoch", info.is_survivor, id(model), len(os.listdir("/proc/self/fd")), mapped)
    for step in range(state["step"], steps):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if info.epoch < kills and step >= info.epoch and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        optimizer.step()
        note("step", step, loss.item().hex())
        snapshot.save(step + 1, model, optimizer, extra={"step": step + 1})
    if "calls" in kept:
        note("calls", len(kept["calls"]))
    snapshot.close()
    dist.destroy_process_group()

main()
"""


def run(folder: Path, kind: str, kills: int) -> list[list]:
    """What the ranks of a job have written."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    flags = ["--in-place", f"--max-restarts={kills}"] if kills else []
    command = ["-m", "libddp.run", "--nproc-per-node=2", "--preload", *flags, "train.py"]
    command += [kind, str(kills)]
    job = launch(command, folder, LIBDDP_KEEPER_LOG=os.devnull)
    ((status, output),) = finish(job, deadline=300)
    assert status == 0, output
    return [json.loads(line) for line in (folder / "facts").read_text().splitlines()]


def losses(facts: list[list]) -> dict:
    found: dict = {}
    for kind, rank, _, _, *rest in facts:
        if kind == "step":
            found.setdefault((rank, rest[0]), set()).add(rest[1])
    return found


@pytest.mark.parametrize("kind", ["ddp", "ddp-hook", "ddp-sharded", "fsdp", "fully_shard"])
def test_survivors_go_on_with_the_same_objects(tmp_path, kind):
    quiet = run(tmp_path / "quiet", kind, 0)
    killed = run(tmp_path / "killed", kind, 12)
    assert losses(killed) == losses(quiet)
    epochs = [fact for fact in killed if fact[0] == "epoch" and fact[1] == 0]
    assert [fact[3] for fact in epochs] == list(range(13))
    assert [fact[4] for fact in epochs] == [False] + [True] * 12
    assert len({(fact[2], fact[5]) for fact in epochs}) == 1, "another process or object"
    for name, place in (("descriptors", 6), ("mapped segments", 7)):
        seen = [fact[place] for fact in epochs]
        assert max(seen[7:]) <= max(seen[2:7]), f"{name} grow: {seen}"
    if kind == "ddp-hook":
        assert min(fact[4] for fact in killed if fact[0] == "calls" and fact[1] == 0) > 14

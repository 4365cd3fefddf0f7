"""Snapshots of jobs on several hosts: copies on the next host, and hosts that are lost.

Hosts are names here (LIBDDP_HOST_ID), each with a keeper of its own; tests/systems has namespaces.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

LINGER = 20.0


def key_file(folder):
    path = Path(folder) / "key"
    if not path.exists():
        path.write_bytes(os.urandom(32) + b"x")  # a newline at the end would not count
        path.chmod(0o600)
    return str(path)


def join(hosts, folder):
    """A group whose ranks are on those hosts."""
    from libddp.distributed import init_process_group

    os.environ["LIBDDP_HOST_ID"] = hosts[int(os.environ["RANK"])]
    os.environ["LIBDDP_RUN_KEY_FILE"] = f"{folder}/key"
    init_process_group("libddp")
    return dist.get_rank()


def make(sharded):
    import fsdp_models as models

    if sharded:
        model = models.shard(models.build(seed=3))
    else:
        from libddp.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(models.build(seed=3))
    return model, models.adamw(model.parameters())


def digest(model):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {
        name.removeprefix("module."): value.double().sum().item() for name, value in state.items()
    }


def save(folder, hosts, sharded, replicas):
    import fsdp_models as models

    import libddp

    rank = join(hosts, folder)
    model, optimizer = make(sharded)
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=LINGER, replicas=replicas)
    for step in range(1, 4):
        models.train(model, 1, lambda _: optimizer, first=step)
        snapshot.save(step, model, optimizer, extra={"rank": rank})
    wanted = digest(model)
    if replicas:
        # Copies come behind the training.
        end = time.monotonic() + 30
        while not copies(snapshot, hosts, rank) and time.monotonic() < end:
            time.sleep(0.05)
        assert copies(snapshot, hosts, rank), snapshot.status()
    dist.barrier()
    return wanted, snapshot.status()["pid"]


def copies(snapshot, hosts, rank):
    """Whether this host has the third save of the ranks of the host before it."""
    names = sorted(set(hosts))
    before = names[names.index(hosts[rank]) - 1]
    wanted = {r for r, host in enumerate(hosts) if host == before}
    found = {
        kept["rank"]
        for kept in snapshot.status()["replicas"]
        if any(slot.get("sequence") == 3 for slot in kept["slots"])
    }
    return wanted <= found


def load(folder, hosts, sharded):
    import libddp

    rank = join(hosts, folder)
    model, optimizer = make(sharded)
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=LINGER)
    extra = snapshot.load(model, optimizer)
    found = digest(model)
    snapshot.save(9, model, optimizer)
    dist.barrier()
    snapshot.close()
    return extra, found, rank


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "sharded"])
@pytest.mark.parametrize("hosts", [("a", "a", "b"), ("c", "d", "a"), ("a", "a")], ids="-".join)
def test_a_host_that_is_lost_loses_no_step(tmp_path, sharded, hosts):
    """Host b is gone with its keeper: its ranks start on a new host, or fewer on the other."""
    key_file(tmp_path)
    saved = ranks.run(save, 3, str(tmp_path), ("a", "a", "b"), sharded, 1)
    os.kill(saved[2][1], signal.SIGKILL)
    if hosts == ("a", "a", "b"):
        hosts = ("a", "a", "new")
    loaded = ranks.run(load, len(hosts), str(tmp_path), hosts, sharded)
    for extra, found, rank in loaded:
        assert extra == {"rank": rank}
        assert found == saved[0][0]


def test_without_copies_the_ranks_that_are_lost_are_lost(tmp_path):
    key_file(tmp_path)
    saved = ranks.run(save, 2, str(tmp_path), ("a", "b"), True, 0)
    os.kill(saved[1][1], signal.SIGKILL)
    for extra, _, _ in ranks.run(load, 2, str(tmp_path), ("a", "b"), True):
        assert extra == {}, "half of a save is none"


def refused(folder):
    import libddp

    os.environ["LIBDDP_HOST_ID"] = "ab"[int(os.environ["RANK"])]
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=1, replicas=1)
    with pytest.raises(libddp.ArgumentError, match="needs a run key"):
        snapshot.save(1, state={"a": torch.zeros(2)})


def test_copies_need_a_key(tmp_path):
    ranks.run(refused, 2, str(tmp_path))


def test_wrong_numbers_of_copies():
    import libddp

    for replicas in (-1, 2):
        with pytest.raises(libddp.ArgumentError, match=f"replicas={replicas}, and each save has"):
            libddp.Snapshot(run="x", replicas=replicas)

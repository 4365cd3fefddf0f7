"""Snapshots of jobs on several hosts: copies on the next host, and hosts that are lost.

Hosts are names here (LIBDDP_HOST_ID), each with a keeper of its own; tests/systems has namespaces.
"""

import mmap
import os
import re
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from run_keys import key_file

LINGER = 20.0


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
    digests = []
    for step in range(1, 4):
        models.train(model, 1, lambda _: optimizer, first=step)
        snapshot.save(step, model, optimizer, extra={"rank": rank})
        digests.append(digest(model))
        # Copies come behind the training, where the next one would take the place of this one.
        end = time.monotonic() + 30
        while replicas and not copies(snapshot, hosts, rank, step) and time.monotonic() < end:
            time.sleep(0.02)
        assert not replicas or copies(snapshot, hosts, rank, step), snapshot.status()
    dist.barrier()
    return digests[2], snapshot.status()["pid"], digests[1]


def copies(snapshot, hosts, rank, sequence):
    """Whether this host has that save of the ranks of the host before it."""
    names = sorted(set(hosts))
    before = names[names.index(hosts[rank]) - 1]
    wanted = {r for r, host in enumerate(hosts) if host == before}
    found = {
        kept["rank"]
        for kept in snapshot.status()["replicas"]
        if any(slot.get("sequence") == sequence for slot in kept["slots"])
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


def flip_in_memory(pid, rank, sequence, part):
    """A bit of a save of a rank in the memory that a keeper holds (libddp/slots/slot_memory.cpp):
    in its "values" or its "data".
    """
    for path in Path(f"/proc/{pid}/fd").iterdir():
        if not os.readlink(path).startswith("/memfd:"):
            continue
        with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:
            if struct.unpack_from("<i", memory, 12)[0] != rank:
                continue
            (data_bytes,) = struct.unpack_from("<Q", memory, 40)
            pages = -(-data_bytes // 4096) * 4096
            sequences = [struct.unpack_from("<Q", memory, 1024 + 128 * i + 24)[0] for i in range(3)]
            slot = sequences.index(sequence)
            place = len(memory) - (3 - slot) * pages
            if part == "values":
                place = memory.find(b'{"format"')
                place = memory.find(b'{"format"', place + 1) if slot == 1 else place
                assert 0 < place < len(memory) - 3 * pages
            memory[place] ^= 4
            return
    raise AssertionError(f"no memory of rank {rank}")


@pytest.mark.parametrize("part", ["values", "data"])
def test_a_copy_that_is_damaged_is_named_and_the_save_before_it_taken(tmp_path, part):
    key_file(tmp_path)
    saved = ranks.run(save, 3, str(tmp_path), ("a", "a", "b"), False, 1)
    os.kill(saved[2][1], signal.SIGKILL)
    flip_in_memory(saved[0][1], rank=2, sequence=3, part=part)
    outcomes = ranks.launch(load, 3, str(tmp_path), ("a", "a", "new"), False)
    for extra, found, rank in ranks.values(outcomes):
        assert extra == {"rank": rank}
        assert found == saved[0][2], "not the second save"
    said = outcomes[0].output
    if part == "values":
        assert "event=snapshot_damaged_in_memory" in said, said
        for words in ('whose="the copy of rank 2 of 3"', "step=3 ", "newest_whole=2"):
            assert words in said, said
        assert "its text of values is not as it was stored" in said, said
        assert said.count("snapshot_damaged_in_memory") == 1, "both ranks of the host tell of it"
    else:
        assert "passed over: libddp snapshot: rank 2 could not fetch memory, step 3" in said, said
        assert re.search(
            r"bytes 0 to \d+ have another checksum than when they were stored \(bytes .* of '", said
        )
        assert "the training goes on from memory, step 2" in said, said


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


#: Of a rank's save below; the keepers send half of it in a second.
SAVE_BYTES = 1 << 20


def one_weight():
    return torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(SAVE_BYTES // 4))})


def load_weight(folder, hosts):
    import libddp

    join(hosts, folder)
    model = one_weight()
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=LINGER)
    step = snapshot.load(model)
    dist.barrier()
    snapshot.close()
    return step, model["w"].unique().tolist()


def lose_a_rank_in_a_save(folder, hosts):
    """Rank 0 dies while the others wait for it, to agree on where the second save goes."""
    import libddp

    rank = join(hosts, folder)
    model = one_weight()
    torch.nn.init.constant_(model["w"], 7)
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=LINGER, replicas=1)
    snapshot.save(1, model, extra=1)
    while not copies(snapshot, hosts, rank, 1):
        time.sleep(0.02)
    dist.barrier()
    if rank == 0:  # its keeper freezes with what it is asked, and then it dies
        keeper = snapshot.status()["pid"]
        os.kill(keeper, signal.SIGSTOP)
        threading.Timer(
            1.0, lambda: [os.kill(pid, signal.SIGKILL) for pid in (keeper, os.getpid())]
        ).start()
    snapshot.save(2, model, extra=2)


def test_a_save_that_a_lost_rank_has_stopped_keeps_nothing_from_the_others(tmp_path):
    """What the ranks had set aside for it is free again: rank 2's memory comes to other hosts."""
    key_file(tmp_path)
    folder = str(tmp_path)
    outcomes = ranks.launch(lose_a_rank_in_a_save, 3, folder, ("a", "b", "c"))
    for outcome in outcomes[1:]:
        assert outcome.error == "PeerError", outcome
        assert "rank 0" in outcome.message, outcome
    assert ranks.run(load_weight, 2, folder, ("b", "c")) == [(1, [7.0])] * 2


def save_faster(folder, hosts, num_steps, pause):
    """Saves closer together than a copy takes; then the newest one is copied in `pause` seconds."""
    import libddp

    os.environ["LIBDDP_REPLICA_BYTES_PER_SECOND"] = str(SAVE_BYTES // 2)
    rank = join(hosts, folder)
    model = one_weight()
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=LINGER, replicas=1)
    for step in range(1, num_steps + 1):
        torch.nn.init.constant_(model["w"], step)
        snapshot.save(step, model, extra=step)
        time.sleep(0.1)
    end = time.monotonic() + pause
    while time.monotonic() < end and not copies(snapshot, hosts, rank, num_steps):
        time.sleep(0.05)
    has_newest = copies(snapshot, hosts, rank, num_steps)
    dist.barrier()
    return snapshot.status(), has_newest


@pytest.mark.parametrize("num_steps", [31, 38, 46])
def test_saves_may_come_faster_than_their_copies(tmp_path, num_steps):
    """A copy takes two seconds, a save comes each tenth: whenever host b is lost, the others have a
    save of the last seconds in common with its copy.
    """
    key_file(tmp_path)
    folder = str(tmp_path)
    saved = ranks.run(save_faster, 3, folder, ("a", "b", "c"), num_steps, 0)
    os.kill(saved[1][0]["pid"], signal.SIGKILL)
    loaded = ranks.run(load_weight, 3, folder, ("a", "new", "c"))
    step = loaded[0][0]
    assert loaded == [(step, [float(step)])] * 3
    left = saved[0][0]["ranks"], saved[2][0]["ranks"], saved[2][0]["replicas"]
    common = set.intersection(*map(kept_steps, left))
    assert common, left
    assert step >= max(common), left


def kept_steps(memories):
    return {slot["step"] for each in memories for slot in each["slots"] if "step" in slot}


def test_the_last_save_is_copied_though_none_comes_after_it(tmp_path):
    key_file(tmp_path)
    saved = ranks.run(save_faster, 3, str(tmp_path), ("a", "b", "c"), 4, 30)
    assert [has_newest for _, has_newest in saved] == [True] * 3
    for status, _ in saved:
        os.kill(status["pid"], signal.SIGKILL)


def test_a_rate_that_is_none_is_refused(tmp_path, monkeypatch):
    import libddp

    monkeypatch.setenv("LIBDDP_REPLICA_BYTES_PER_SECOND", "fast")
    with pytest.raises(libddp.ArgumentError, match="LIBDDP_REPLICA_BYTES_PER_SECOND"):
        libddp.Snapshot(run=f"rate-{os.getpid()}", linger=1).save(1, state={"a": torch.zeros(2)})


def test_copies_need_a_key(tmp_path):
    ranks.run(refused, 2, str(tmp_path))


def part(folder, hosts, seed, steps, replicas=0, resumes=None):
    """Some hosts of a job, which do not see the others, resume and save `steps` with weights of
    their own.
    """
    import libddp

    rank = join(hosts, folder)
    model = torch.nn.Linear(2, 2)
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=LINGER, replicas=replicas)
    assert snapshot.load(model) == (resumes or {})
    for sequence, step in enumerate(steps, 1):
        torch.nn.init.constant_(model.weight, seed + step)
        snapshot.save(step, model, extra={"seed": seed, "step": step})
        end = time.monotonic() + 30
        while replicas and not copies(snapshot, hosts, rank, sequence):
            assert time.monotonic() < end, snapshot.status()
            time.sleep(0.02)
    dist.barrier()


def together(folder, hosts):
    import libddp

    join(hosts, folder)
    model = torch.nn.Linear(2, 2)
    snapshot = libddp.Snapshot(run=Path(folder).name[-30:], linger=LINGER)
    extra = snapshot.load(model)
    snapshot.save(100, model, extra="together")
    dist.barrier()
    return extra, model.weight[0, 0].item()


@pytest.mark.parametrize("steps", [(1, 2, 3), (11, 12, 13), (4, 3, 3)], ids=str)
def test_hosts_that_went_on_apart_go_on_from_one_of_them(tmp_path, steps):
    """Each alone has saved as often as the other one: their saves are not taken for one."""
    key_file(tmp_path)
    ranks.run(part, 1, str(tmp_path), ("a",), 1000, (1, 2, 3))
    ranks.run(part, 1, str(tmp_path), ("b",), 2000, steps)
    found = ranks.run(together, 2, str(tmp_path), ("a", "b"))
    (extra, weight), other = found
    assert other == (extra, weight)
    assert weight == extra["seed"] + extra["step"]
    assert extra in ({"seed": 1000, "step": 3}, {"seed": 2000, "step": steps[-1]})
    # The other way round, and what has been saved since.
    assert ranks.run(together, 2, str(tmp_path), ("b", "a")) == [("together", weight)] * 2


def test_two_halves_that_went_on_with_one_memory_are_not_mixed(tmp_path):
    """Hosts a and b have all of a save. Each goes on with a new host and saves once more; then one
    host of each half is there: the last save of either half lacks a rank.
    """
    key_file(tmp_path)
    folder = str(tmp_path)
    ranks.run(part, 2, folder, ("a", "b"), 1000, (1, 2, 3), 1)
    both = {"seed": 1000, "step": 3}
    ranks.run(part, 2, folder, ("a", "c"), 2000, (4,), 0, both)
    ranks.run(part, 2, folder, ("b", "d"), 3000, (4,), 0, both)
    assert ranks.run(together, 2, folder, ("a", "d")) == [(both, 1003.0)] * 2


def unkeyed(folder, hosts, step):
    """Saves that step in the folder and the next one in memory; None: loads."""
    from libddp.distributed import init_process_group

    import libddp

    os.environ["LIBDDP_HOST_ID"] = hosts[int(os.environ["RANK"])]
    init_process_group("libddp")
    model = torch.nn.Linear(2, 2)
    snapshot = libddp.Snapshot(folder, linger=LINGER)
    extra = snapshot.load(model)
    if step is not None:
        snapshot.save(step, model, extra={"step": step}, storage=True)
        snapshot.wait()
        snapshot.save(step + 1, model, extra={"step": step + 1})
    dist.barrier()
    return extra


def test_hosts_without_a_key_take_what_all_of_them_have(tmp_path):
    """The newest save is on one host only, and nobody can fetch it."""
    folder = str(tmp_path / "stored")
    assert ranks.run(unkeyed, 1, folder, ("a",), 1) == [{}]
    found = ranks.run(unkeyed, 2, folder, ("b", "a"), None)
    assert found == [{"step": 1}] * 2


def test_wrong_numbers_of_copies():
    import libddp

    for replicas in (-1, 2):
        with pytest.raises(libddp.ArgumentError, match=f"replicas={replicas}, and each save has"):
            libddp.Snapshot(run="x", replicas=replicas)

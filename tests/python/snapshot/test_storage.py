"""libddp.Snapshot with an address in place of a folder: an S3 server that fails and is slow."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ranks
import torch

import libddp

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
#: Generous: the machine may be busy.
DEADLINE = 90.0


@pytest.fixture(scope="module")
def server():
    from faulty_s3 import FaultyS3

    with FaultyS3() as started, pytest.MonkeyPatch.context() as patch:
        started.make_bucket("bucket")
        # One request and s3fs' own five tries of it.
        for name, value in {**started.environment, "AWS_MAX_ATTEMPTS": "1"}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield started
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def well(server):
    """The server, without faults before and after."""
    never = lambda method, path: None  # noqa: E731
    at_once = lambda method, path: 0.0  # noqa: E731
    server.answer, server.delay = never, at_once
    server.requests.clear()
    yield server
    server.answer, server.delay = never, at_once


def until(condition, what):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def state_of(step):
    # Of several chunks of 4 MiB.
    return {"w": torch.arange(3_000_000, dtype=torch.float32) + step, "step": step}


def check_loaded(found, step):
    assert found["step"] == step
    assert torch.equal(found["w"], state_of(step)["w"])


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(600_000.0).view(1000, 600))


def three_ranks_store(url, environment):
    from libddp.distributed import destroy_process_group, init_process_group
    from libddp.distributed.fsdp import fully_shard

    os.environ |= environment
    init_process_group("libddp")
    model = fully_shard(Parts())
    with libddp.Snapshot(url, linger=20) as snapshot:
        assert snapshot.load(model) == {}
        assert snapshot.latest_step() is None
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight.to_local().add_(1)
            snapshot.save(step, model, extra={"step": step}, storage=True)
            snapshot.wait(DEADLINE)
    destroy_process_group()


def two_ranks_load(url, environment, newest):
    import ddp_models
    from libddp.distributed import destroy_process_group, init_process_group

    os.environ |= environment
    init_process_group("libddp")
    model = ddp_models.libddp_ddp()(Parts())
    with libddp.Snapshot(url, linger=20) as snapshot:
        assert snapshot.load(model) == {"step": newest}
        whole = torch.arange(600_000.0).view(1000, 600)
        assert torch.equal(model.module.weight, whole + newest)
        assert snapshot.load(model, step=2) == {"step": 2}
        assert torch.equal(model.module.weight, whole + 2)
    destroy_process_group()


def test_ranks_store_and_others_load(well, capsys, tmp_path):
    from libddp._snapshot_command import main

    url = "s3://bucket/ranks"
    ranks.run(three_ranks_store, 3, url, well.environment)
    names = well.objects("bucket", "ranks/")
    assert [name.split("/")[0] for name in names] == ["run"] + ["step-2.2"] * 4 + ["step-3.3"] * 4
    ranks.run(two_ranks_load, 2, url, well.environment, 3)

    assert main(["ls", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["step"], each["ranks"]) for each in told["snapshots"]] == [(3, 3), (2, 3)]
    assert told["unfinished"] == []
    assert all(each["time"] for each in told["snapshots"])
    assert main(["verify", url, "--all"]) == 0
    assert capsys.readouterr().out.count("whole; 3 files") == 2
    assert main(["show", url]) == 0
    assert "model.weight" in capsys.readouterr().out
    assert main(["export", url, str(tmp_path / "model.safetensors")]) == 0
    from safetensors.torch import load_file

    weight = load_file(tmp_path / "model.safetensors")["weight"]
    assert torch.equal(weight, torch.arange(600_000.0).view(1000, 600) + 3)

    # Of the newest, one byte is another one: the next older is taken.
    (name,) = [each for each in names if each.startswith("step-3.3/rank-1-of-3.")]
    damaged = bytearray(well.read("bucket", f"ranks/{name}"))
    damaged[-9] ^= 4
    well.write("bucket", f"ranks/{name}", bytes(damaged))
    capsys.readouterr()
    assert main(["verify", url]) == 1
    assert f"{url}/{name} is damaged: bytes 0 to" in capsys.readouterr().err
    ranks.run(two_ranks_load, 2, url, well.environment, 2)


DYING = """
import sys, time, torch, libddp
snapshot = libddp.Snapshot(sys.argv[1], linger=3)
for step in (1, 2):
    snapshot.save(step, state={"w": torch.arange(3_000_000.0) + step, "step": step}, storage=True)
    if step == 1:
        snapshot.wait(90)
print(snapshot.status()["pid"], flush=True)
time.sleep(600)
"""


def test_what_was_on_its_way_arrives_when_all_workers_die(well):
    def slow(method, path):
        return 1.5 if method in ("PUT", "POST") and "/step-2.2/" in path else 0.0

    well.delay = slow
    url = "s3://bucket/dying"
    worker = subprocess.Popen(
        [sys.executable, "-c", DYING, url],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        keeper = int(worker.stdout.readline())
        until(lambda: any("/step-2.2/" in path for _, path in well.requests), "it begins")
        assert "step-2.2/index.json" not in well.objects("bucket", "dying/")
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(DEADLINE)
        until(lambda: "step-2.2/index.json" in well.objects("bucket", "dying/"), "it is there")
        # Nobody comes back: it ends, and what it has started does.
        until(lambda: not os.path.exists(f"/proc/{keeper}"), "the keeper ends")
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    with libddp.Snapshot(url, linger=1) as snapshot:
        check_loaded(snapshot.load(), 2)


def test_saves_go_on_while_one_is_on_its_way(well):
    well.delay = lambda method, path: 1.0 if method == "PUT" and "/step-" in path else 0.0
    url = "s3://bucket/slow"
    with libddp.Snapshot(url, linger=5, keep=1) as snapshot:
        snapshot.save(1, state=state_of(1), storage=True)
        until(lambda: any("/step-1.1/" in path for _, path in well.requests), "it begins")
        step = 1
        while "step-1.1/index.json" not in well.objects("bucket", "slow/"):
            step += 1
            snapshot.save(step, state=state_of(step), storage=True)
        assert step > 4, "saves have waited for the storage"
        snapshot.wait(DEADLINE)
        # What waited was replaced by what was newer.
        until(lambda: len(well.objects("bucket", "slow/")) == 3, "the older one goes")
        assert f"step-{step}.{step}/index.json" in well.objects("bucket", "slow/")
        assert len({path for _, path in well.requests if path.endswith("index.json")}) < step
        check_loaded(snapshot.load(), step)


def test_what_takes_the_place_of_a_save_that_waits_is_stored(well):
    """Also where it was for memory alone: something as new was to be stored."""
    gate = threading.Event()

    def held(method: str, path: str) -> float:
        if "/step-1.1/" in path:
            gate.wait(DEADLINE)
        return 0.0

    well.delay = held
    with libddp.Snapshot("s3://bucket/place", linger=5) as snapshot:
        snapshot.save(1, state=state_of(1), storage=True)
        until(lambda: any("/step-1.1/" in path for _, path in well.requests), "it begins")
        snapshot.save(2, state=state_of(2), storage=True)  # waits, in the second of two places
        snapshot.save(3, state=state_of(3))
        gate.set()
        snapshot.wait(DEADLINE)
        stored = {name.split("/")[0] for name in well.objects("bucket", "place/") if "/" in name}
        assert stored == {"step-1.1", "step-3.3"}
        snapshot.save(4, state=state_of(4))  # nothing waits any more
        snapshot.wait(DEADLINE)
        assert not well.objects("bucket", "place/step-4")


FAULTS = [
    (403, "AccessDenied", "look at the credentials"),
    (503, "SlowDown", "the file system has tried again itself"),
    (404, "NoSuchBucket", "make the bucket"),
]


def test_what_is_refused_is_told_once_and_training_goes_on(well, tmp_path, monkeypatch):
    log = tmp_path / "keeper.txt"
    monkeypatch.setenv("LIBDDP_KEEPER_LOG", str(log))
    url = "s3://bucket/refused"
    with libddp.Snapshot(url, linger=5) as snapshot:
        snapshot.save(1, state=state_of(1), storage=True)
        snapshot.wait(DEADLINE)
        step, stored = 1, 1
        for status, reason, hint in FAULTS:
            well.answer = lambda method, path, s=status: s if method in ("PUT", "POST") else None
            for _ in range(2):
                step += 1
                snapshot.save(step, state=state_of(step), storage=True)
                with pytest.raises(libddp.SnapshotError) as caught:
                    snapshot.wait(DEADLINE)
                told = str(caught.value)
                assert f"{url}/step-{step}.{step}/rank-0-of-1." in told
                assert reason in told
                assert hint in told
            names = well.objects("bucket", "refused/")
            assert [n for n in names if n.endswith("index.json")] == [
                f"step-{stored}.{stored}/index.json"
            ] or len(names) > 3
            well.answer = lambda method, path: None
            step += 1
            snapshot.save(step, state=state_of(step), storage=True)
            snapshot.wait(DEADLINE)
            stored = step
        # A burst is the file system's to try again.
        left = [3]

        def burst(method, path):
            left[0] -= method == "PUT"
            return 503 if method == "PUT" and left[0] >= 0 else None

        well.answer = burst
        snapshot.save(20, state=state_of(20), storage=True)
        snapshot.wait(DEADLINE)
        assert left[0] < 0
        check_loaded(snapshot.load(), 20)
    for _, reason, _ in FAULTS:
        assert log.read_text().count(reason) > 0, reason


def test_an_address_that_cannot_be_used(well, monkeypatch):
    for url, text in [
        ("memory://run", r"the memory of this process, which no other one sees"),
        ("nosuch://bucket/run", r"Protocol not known: nosuch"),
        ("gs://bucket/run", r"gs://bucket/run: no file system .*gcsfs"),
    ]:
        with pytest.raises(libddp.ArgumentError, match=text):
            libddp.Snapshot(url)
    with libddp.Snapshot("s3://nobucket/run", linger=1) as snapshot:
        assert snapshot.load() == {}
        with pytest.raises(libddp.SnapshotError, match=r"NoSuchBucket.* Hint: make the bucket"):
            snapshot.save(1, state={"a": 1}, storage=True)
    well.answer = lambda method, path: 403
    with (
        libddp.Snapshot("s3://bucket/other", linger=1) as snapshot,
        pytest.raises(libddp.SnapshotError, match=r"could not be listed: .*AccessDenied"),
    ):
        snapshot.load()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(libddp.ArgumentError, match="needs fsspec, which is not installed"):
        libddp.Snapshot("s3://bucket/run")


def test_file_urls_are_folders(tmp_path):
    with libddp.Snapshot(f"file://{tmp_path}/run", linger=5) as snapshot:
        snapshot.save(1, state={"a": 1}, storage=True)
        snapshot.wait(DEADLINE)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run", "step-1.1"]

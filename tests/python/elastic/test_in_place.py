"""`libddp run --in-place`: survivors keep their processes, and losses are those of a quiet run."""

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from launches import finish, launch, stop

#: A training that writes a line of facts for whatever it does: kind, rank, pid, epoch, ...
TRAINING = """
import json, os, sys, time
import torch
import libddp
import libddp.distributed as dist
from libddp.distributed.fsdp import FullyShardedDataParallel
from libddp.nn.parallel import DistributedDataParallel

options = {"mode": "ddp", "steps": 12, "kills": 0, "pause": 0.0} | json.loads(sys.argv[1])
calls = []  # of this process: what lies outside of main() stays

def note(kind, *facts):
    line = [kind, int(os.environ["RANK"]), os.getpid(), libddp.elastic.info().epoch, *facts]
    with open("facts", "a") as file:
        file.write(json.dumps(line) + "\\n")

def wrapped(model):
    ddp = options["mode"] == "ddp"
    return DistributedDataParallel(model) if ddp else FullyShardedDataParallel(model)

@libddp.elastic.run
def main():
    info = libddp.elastic.info()
    calls.append(info.epoch)
    dist.init_process_group()
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
    model = wrapped(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    snapshot = libddp.Snapshot("run", linger=5)
    state = snapshot.load(model, optimizer)
    if not state:
        torch.manual_seed(dist.get_rank())
    open_ones = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
    note("epoch", info.is_survivor, len(calls), info.restarts, info.last_failure, *open_ones)
    for step in range(state.get("step", 0), options["steps"]):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note("step", step, loss.item().hex())
        if info.epoch < options["kills"] and step >= info.epoch // 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        time.sleep(options["pause"])
        snapshot.save(step + 1, model, optimizer, extra={"step": step + 1})
    snapshot.close()
    dist.destroy_process_group()

main()
"""


@dataclass
class Facts:
    """What the ranks of a job have written."""

    epochs: list[list]
    #: The losses of each step, by rank and step.
    losses: dict[tuple[int, int], set[str]]
    #: (rank, process) of those that wrote a step in the newest epoch.
    newest: set[tuple[int, int]]

    @classmethod
    def read(cls, folder: Path) -> "Facts":
        lines = (folder / "facts").read_text().splitlines() if (folder / "facts").exists() else []
        found = [json.loads(line) for line in lines]
        steps = [fact for fact in found if fact[0] == "step"]
        losses: dict[tuple[int, int], set[str]] = {}
        for _, rank, _, _, step, loss in steps:
            losses.setdefault((rank, step), set()).add(loss)
        last = max((fact[3] for fact in steps), default=-1)
        newest = {(fact[1], fact[2]) for fact in steps if fact[3] == last}
        return cls([fact for fact in found if fact[0] == "epoch"], losses, newest)


def command(text: str, folder: Path, *flags: str, options: str = "{}") -> list:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    return ["-m", "libddp.run", "--nproc-per-node=2", *flags, "train.py", options]


def run(text: str, folder: Path, *flags: str, options: str = "{}") -> tuple[int, str]:
    job = launch(
        command(text, folder, *flags, options=options), folder, LIBDDP_KEEPER_LOG=os.devnull
    )
    ((status, output),) = finish(job, deadline=300)
    return status, output


def words_of_another_job(folder: Path) -> None:
    folder.mkdir(parents=True)
    told = {"rank": 1, "place": [], "time": 0.0, "follows": False, "is_nobodys": False, "step": 0}
    message = {"message": "not of this job", "extraInfo": {"libddp": told}}
    (folder / "error.json").write_text(json.dumps({"message": message}))


IN_PLACE = ("--in-place", "--preload")


def test_twenty_kills_leave_nothing_behind_and_repeat_every_loss(tmp_path):
    options = '{"kills": 20, "steps": 14}'
    quiet, output = run(TRAINING, tmp_path / "quiet", "--preload", options='{"steps": 14}')
    assert quiet == 0, output
    words_of_another_job(tmp_path / "killed" / "job")
    status, output = run(
        TRAINING, tmp_path / "killed", *IN_PLACE, "--max-restarts=20", options=options
    )
    assert status == 0, output
    assert "leaked" not in output
    found = Facts.read(tmp_path / "killed")
    assert found.losses == Facts.read(tmp_path / "quiet").losses
    survivor = [fact for fact in found.epochs if fact[1] == 0]
    assert [fact[3] for fact in survivor] == list(range(21))
    assert len({fact[2] for fact in survivor}) == 1, "rank 0 was another process"
    assert len({fact[2] for fact in found.epochs if fact[1] == 1}) == 21
    assert [fact[4:7] for fact in survivor] == [[n > 0, n + 1, n] for n in range(21)]
    assert survivor[20][7].startswith("rank 1: Signal 9 (SIGKILL) received by PID ")
    assert [fact[4:6] for fact in found.epochs if fact[1] == 1] == [[False, 1]] * 21
    for name, counts in (("descriptors", 8), ("threads", 9)):
        seen = [fact[counts] for fact in survivor]
        assert max(seen[11:]) <= max(seen[2:11]), f"{name} grow: {seen}"


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_each_rank_may_be_killed_at_any_moment(tmp_path, mode):
    steps, chance = 60, random.Random()
    seed = random.randrange(1 << 30)
    chance.seed(seed)
    options = f'{{"mode": "{mode}", "steps": {steps}, "pause": 0.01}}'
    quiet, output = run(TRAINING, tmp_path / "quiet", "--preload", options=options)
    assert quiet == 0, output
    folder = tmp_path / "killed"
    arguments = command(TRAINING, folder, *IN_PLACE, "--max-restarts=4", options=options)
    job = launch(arguments, folder, LIBDDP_KEEPER_LOG=os.devnull)
    pids = {}
    try:
        for number, victim in enumerate([1, 0, 1, 0]):
            # From the begin of an epoch on: in its meeting, its load, a step, or a save.
            until(lambda n=number: len(Facts.read(folder).epochs) >= 2 * n + (n > 0), job)
            until(lambda: len(Facts.read(folder).newest) == 2, job) if number < 2 else None
            time.sleep(chance.uniform(0, 0.3))
            pids = {fact[1]: fact[2] for fact in Facts.read(folder).epochs}
            if job.poll() is not None:
                break
            os.kill(pids[victim], signal.SIGKILL)
            time.sleep(0.5)
    except ProcessLookupError:
        pass  # killed before it could write a line of itself
    ((status, output),) = finish(job, deadline=300)
    assert status == 0, f"seed {seed}\n{output}"
    found = Facts.read(folder)
    assert found.losses == Facts.read(tmp_path / "quiet").losses, f"seed {seed}\n{output}"
    assert any(fact[4] for fact in found.epochs), "nobody survived"


def until(condition, job, seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition() and job.poll() is None:
        if time.monotonic() > limit:
            stop(job)
            pytest.fail(f"waited in vain: {job.communicate()[0]}")
        time.sleep(0.01)


RANK_1_RAISES = """
import os, time
import libddp, libddp.distributed as dist

@libddp.elastic.run
def main():
    dist.init_process_group()
    with open("pids", "a") as file:
        print(os.environ["RANK"], os.getpid(), libddp.elastic.info().last_failure, file=file)
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("no such token")
    dist.barrier()

main()
"""


def test_the_same_error_twice_ends_the_run_with_it(tmp_path):
    status, output = run(RANK_1_RAISES, tmp_path, *IN_PLACE, "--max-restarts=5")
    assert status == 1
    assert "the same error twice, so it would come again" in output
    screen = output[output.index("libddp run: failed") :]
    assert "rank 1 was first: ValueError: no such token\n" in screen
    assert "train.py:12\n" in screen
    pids = [line.split(maxsplit=2) for line in (tmp_path / "pids").read_text().splitlines()]
    assert len({pid for rank, pid, *_ in pids if rank == "0"}) == 1
    assert len({pid for rank, pid, *_ in pids if rank == "1"}) == 2
    assert ["rank 1: ValueError: no such token\n".strip()] * 2 == [p[2] for p in pids if len(p) > 2]


ENDS = """
import os, signal, sys, time
import libddp, libddp.distributed as dist

def main():
    dist.init_process_group()
    rank, epoch, how = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
    with open("ranks", "a") as file:
        print(rank, epoch, os.getpid(), file=file, flush=True)
    dist.barrier()
    if how == "exit" and rank == 1:
        sys.exit(7)
    if how == "stuck" and epoch == 0:
        time.sleep(1) if rank == 1 else time.sleep(600)
        os.kill(os.getpid(), 9)
    if how == "stopped" and epoch == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "late" and epoch == 0:
        if rank == 0:
            os._exit(0)
        time.sleep(1)
        os.kill(os.getpid(), 9)
    if how == "ranks call different things":
        dist.barrier() if rank else dist.all_gather_object([None, None], 1)
    if how == "sleep":
        time.sleep(600)
    dist.barrier()
    dist.destroy_process_group()

{run}
"""
DECORATED = ENDS.replace("{run}", "libddp.elastic.run(main)()")
PLAIN = ENDS.replace("{run}", "main()")


@pytest.mark.parametrize(
    ("text", "how", "flags", "status", "told", "starts"),
    [
        (DECORATED, "exit", [], 7, "exit code of rank 1: 7; of libddp run: 7", [1, 1]),
        (PLAIN, "exit", ["--max-restarts=1"], 7, "so all are started again", [2, 2]),
        (
            DECORATED,
            "stuck",
            ["--max-restarts=1", "--rejoin-timeout=3"],
            0,
            "has not come to the next epoch within 3 s, so it is ended and replaced",
            [2, 2],
        ),
        (
            DECORATED,
            "stopped",
            ["--max-restarts=1", "--rejoin-timeout=3000"],
            0,
            "is stopped (SIGSTOP or Ctrl-Z), and the others have gone on without it",
            [1, 2],
        ),
        (DECORATED, "late", ["--max-restarts=1"], 0, "0 stay in place, 2 are new", [2, 2]),
        (
            DECORATED,
            "ranks call different things",
            ["--max-restarts=3"],
            1,
            "libddp run: failed; between ranks: ",
            None,  # who ends first may be a peer that died to the other
        ),
    ],
    ids=["exit", "plain", "stuck", "stopped", "late", "mismatch"],
)
def test_how_it_ends(tmp_path, text, how, flags, status, told, starts):
    modules = "--preload-modules=torch,libddp.distributed,libddp.elastic"
    found, output = run(text, tmp_path, *IN_PLACE, modules, *flags, options=how)
    assert (found, told in output) == (status, True), output
    lines = [line.split() for line in (tmp_path / "ranks").read_text().splitlines()]
    pids = [len({line[2] for line in lines if line[0] == rank}) for rank in "01"]
    assert starts in (None, pids), output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_ends_the_workers(tmp_path, number, status):
    job = launch(command(DECORATED, tmp_path, "--in-place", options="sleep"), tmp_path)
    until(lambda: (tmp_path / "ranks").exists() and len(pids_in(tmp_path)) == 2, job)
    job.send_signal(number)
    ((found, output),) = finish(job, deadline=120)
    assert found == status, output
    assert f"ended by {number.name}; the workers are stopped" in output
    limit = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids_in(tmp_path)):
        assert time.monotonic() < limit
        time.sleep(0.05)


def pids_in(folder: Path) -> list[str]:
    return [line.split()[2] for line in (folder / "ranks").read_text().splitlines()]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--run-path"], "--run-path starts functions, not programs"),
        (["--master-port=29511"], "--rdzv-backend=static lets hosts meet once"),
        (["--node_unit=2", "--nnodes=2:4"], "--node_unit=2 stops the workers of spare hosts"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, flags, told):
    status, output = run(PLAIN, tmp_path, "--in-place", *flags)
    assert status != 0
    assert f"libddp run: --in-place: {told}" in output


def test_without_the_launcher_main_is_just_called(monkeypatch):
    from libddp.errors import PeerError

    from libddp import elastic

    monkeypatch.delenv("LIBDDP_IN_PLACE", raising=False)
    assert elastic.run(lambda value: value + 1)(1) == 2
    assert elastic.info() == elastic.Info(0, 0, False, "")

    @elastic.run
    def fails():
        raise PeerError("rank 1 died")

    with pytest.raises(PeerError, match="rank 1 died"):
        fails()
    assert "libddp.elastic" in sys.modules

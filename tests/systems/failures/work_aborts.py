"""What ranks do that give up, are interrupted, or fork."""

from __future__ import annotations

import os
import pickle
import threading
import time

import torch

from failures.work import forever, join


def loop_and_abort(me, victim: int, delay_s: float) -> dict:
    dist = join(me)
    aborted = {}
    group = dist.native()
    body = forever(me, dist)
    dist.barrier()

    def abort():
        time.sleep(delay_s)
        aborted["aborted_at"] = time.monotonic()
        group.abort("loss is NaN")

    thread = threading.Thread(target=abort)
    if me.rank == victim:
        thread.start()
    learned = me.learn(body)
    if me.rank == victim:
        thread.join()
    dist.destroy_process_group()
    return learned | aborted


class Fragile(torch.nn.Module):
    """Its forward or backward fails in the third step of one rank."""

    def __init__(self, me, victim: int, fails_in: str):
        super().__init__()
        self.fails_in = fails_in
        self.layer = torch.nn.Linear(64, 64)
        self.raised = me.folder / "raised"
        self.steps_left = 3 if me.rank == victim else 1 << 30

    def forward(self, x):
        self.steps_left -= 1
        if self.steps_left == 0 and self.fails_in == "forward":
            self.fail()
        output = self.layer(x)
        if self.steps_left == 0:
            output.register_hook(self.fail)
        return output

    def fail(self, _grad=None):
        self.raised.write_text(str(time.monotonic()))
        raise LookupError("no such token")


def training(me, victim: int, fails_in: str = "forward"):
    """(dist, a function that trains until something fails)"""
    from libddp.nn.parallel import DistributedDataParallel

    dist = join(me)
    model = DistributedDataParallel(Fragile(me, victim, fails_in))

    def train():
        while True:
            model(torch.ones(4, 64)).sum().backward()

    return dist, train


def train_and_raise(me, victim: int) -> dict:
    """The victim's forward fails in the midst of the others' work, and nobody catches that."""
    dist, train = training(me, victim)
    if me.rank == victim:
        train()
    learned = me.learn(train)
    dist.destroy_process_group()
    return learned


def train_and_catch(me, victim: int, fails_in: str = "forward") -> dict:
    """The victim catches what its step raised, and does something else."""
    import libddp

    libddp.install()  # its engine sees what a backward pass raises
    dist, train = training(me, victim, fails_in)
    learned = me.learn(train)
    if me.rank == victim:
        assert learned["type"] == "LookupError", learned
        me.wait_for("over")
    me.mark("learned")
    dist.destroy_process_group()
    return learned


def blocked(form: str, dist):
    """A call that waits for the other rank."""
    if form == "all_reduce":
        return lambda: dist.all_reduce(torch.ones(1))
    if form == "async":
        return lambda: dist.all_reduce(torch.ones(1), async_op=True).wait()
    if form == "large":
        return lambda: dist.all_reduce(torch.ones(1 << 20))
    if form == "recv":
        return lambda: dist.recv(torch.ones(1), 1 - dist.get_rank())
    if form == "barrier":
        return dist.barrier
    from libddp.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    return lambda: model(torch.ones(1, 8)).sum().backward()


def wait_for_interrupt(me, form: str) -> dict:
    dist = join(me)
    call = blocked(form, dist)
    dist.barrier()
    me.mark("ready")
    if me.rank == 1:
        me.wait_for("go on")
        learned = me.learn(call)
        again = dist.barrier if form != "async" else lambda: None
        learned["again"] = me.learn(again)["type"]
    else:
        learned = me.learn(call)
        me.mark("interrupted")
    dist.destroy_process_group()
    return learned


def join_alone(me) -> dict:
    me.mark("ready")
    if me.rank == 1:
        me.wait_for("go on")
        return me.learn(me.join)
    learned = me.learn(me.join)
    me.mark("interrupted")
    return learned


def fork_and_call(me) -> dict:
    """What the child learned; the parent's group goes on."""
    import torch.distributed as torch_dist

    dist = join(me)
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "through torch": lambda: torch_dist.all_reduce(torch.ones(1)),
        "async": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
        "recv": lambda: dist.recv(torch.ones(1), 1 - me.rank),
        "barrier": dist.barrier,
    }
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            learned = {name: me.learn(call) for name, call in calls.items()}
            os.write(theirs, pickle.dumps(learned))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        learned = pickle.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == me.world_size
    dist.destroy_process_group()
    return learned


def loop_until_anything(me) -> None:
    """The interrupt of this rank and the error of another one's may come right after another."""
    body = forever(me, join(me))
    me.mark("ready")
    try:
        body()
    except BaseException:
        os._exit(0)

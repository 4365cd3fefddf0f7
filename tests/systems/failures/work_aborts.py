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


def train_and_raise(me, victim: int) -> dict:
    """The victim's forward fails in its third step, in the midst of the others' work."""
    from libddp.nn.parallel import DistributedDataParallel

    dist = join(me)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    steps = 0

    def step():
        nonlocal steps
        steps += 1
        if steps == 3 and me.rank == victim:
            (me.folder / "raised").write_text(str(time.monotonic()))
            raise LookupError("no such token")
        model(torch.ones(4, 64)).sum().backward()

    def train():
        while True:
            step()

    if me.rank == victim:
        train()
    learned = me.learn(train)
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

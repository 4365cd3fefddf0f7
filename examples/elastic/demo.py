"""Kills and moves a training while it runs, and shows what each event has cost.

    python demo.py                         # all acts: a minute or two, root for the hosts' deaths
    python demo.py --acts=worker,agent     # these; --help lists the keys

`libddp run` trains train_elastic.py with a snapshot in memory every few steps, first with two
workers, then with one worker on each of one or two hosts. It prints a table and writes demo.json
and loss.png into OUT_DIR. The exit status is 0 if the losses of all repeated steps were the lost
ones, bit for bit, and 1 if not.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hosts import Hosts
from picture import draw
from record import STEPS, Cost, Event, Record, losses
from shared import UserError, key, parse, run_script

ACTS = ("worker", "agent", "hosts")
SCRIPT = Path(__file__).resolve().parent / "train_elastic.py"
#: Of each launcher. Another way of starting over is another flag here.
LAUNCH = ["--preload", "--max-restarts=20"]


@dataclass
class DemoSettings:
    out_dir: str = key("out/elastic", "folder of everything that is written")
    acts: tuple[str, ...] = key(ACTS, "of worker, agent, hosts")
    calm: float = key(2.0, "seconds of training between two events")
    snapshot_every: int = key(5, "steps between snapshots; more of them are lost, to be repeated")
    compare: bool = key(False, "train again without any event, and compare each loss")
    deadline: float = key(120.0, "seconds after which a step that does not come is an error")
    train: tuple[str, ...] = key((), "further keys of train_elastic.py, as in n_layer=1,n_embd=32")


class Demo:
    """Thread rule: one thread."""

    def __init__(self, settings: DemoSettings, hosts: Hosts, record: Record):
        self.settings, self.hosts, self.record = settings, hosts, record
        self.costs: list[Cost] = []
        self.left_out = ""

    def run(self) -> None:
        acts = self.settings.acts
        if "worker" in acts or "agent" in acts:
            self.two_workers()
        if "hosts" in acts:
            self.some_hosts()

    def two_workers(self) -> None:
        flags = ["--nnodes=1", "--nproc-per-node=2"]
        self.begin("two workers on one host", 2, 0, *flags)
        if "worker" in self.settings.acts:
            worker = self.record.newest(1).pid
            self.suffer("a worker is killed", 2, lambda: os.kill(worker, signal.SIGKILL))
        if "agent" in self.settings.acts:
            self.suffer("the agent is killed", 2, lambda: self.agent_anew(*flags))
        self.stop(0)

    def agent_anew(self, *flags: str) -> None:
        """The keeper has the memory: it outlives the agent, and waits for the next one."""
        self.hosts.kill_launcher(0)
        self.hosts.start(0, *flags)

    def some_hosts(self) -> None:
        flags = ["--nnodes=1:2", "--nproc-per-node=1"]
        self.begin("one host, one worker", 1, 0, *flags)
        self.suffer("a host comes", 2, lambda: self.hosts.start(1, *flags))
        if self.hosts.missing:
            self.left_out = (
                "NOT SHOWN: the death of a host needs network namespaces, and they need root "
                f"({self.hosts.missing})"
            )
            say(self.left_out)
        else:
            self.suffer("a host dies", 1, lambda: self.hosts.pull_the_plug(1))
            self.hosts.repair(1)
            self.suffer("a host comes again", 2, lambda: self.hosts.start(1, *flags))
        self.suffer("a host leaves", 1, lambda: self.hosts.leave(1, self.settings.deadline))
        self.stop(0)

    def begin(self, what: str, ranks: int, host: int, *flags: str) -> None:
        """A launcher starts where none was; only what comes later is an event."""
        say(what)
        begin = self.record.event(what)
        self.hosts.start(host, *flags)
        self.wait_for(begin, ranks)

    def suffer(self, name: str, ranks: int, act: Callable) -> None:
        """Let it happen, and wait until so many ranks train again."""
        event = self.record.event(name)
        act()
        self.wait_for(event, ranks)
        cost = self.record.cost_of(event)
        self.costs.append(cost)
        say(f"{name}: {cost.seconds:.2f} s to step {cost.step}, {cost.ranks} ranks")

    def wait_for(self, event: Event, ranks: int) -> None:
        """Until that many ranks have done a step after the event, and some seconds more."""

        def is_there() -> bool:
            lines = self.record.since(event)
            return bool(lines) and lines[-1].world == ranks

        self.until(is_there, f"{event.name}: no step of {ranks} ranks")
        time.sleep(self.settings.calm)

    def stop(self, host: int) -> None:
        """The training ends by itself behind a step, and nothing is left in memory."""
        (Path(self.settings.out_dir) / "stop").touch()
        launcher = self.hosts.launchers[host]
        self.until(lambda: launcher.poll() == 0, "the training does not end")
        del self.hosts.launchers[host]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + self.settings.deadline
        while not condition():
            ended = [h for h, launcher in self.hosts.launchers.items() if launcher.poll()]
            if ended or time.monotonic() > limit:
                why = f"launcher {ended[0]} has ended" if ended else "the time is up"
                said = self.hosts.said(ended[0] if ended else 0)[-3000:]
                raise UserError(f"{what} ({why}); it has said:\n{said}")
            time.sleep(0.02)


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def table(costs: list[Cost]) -> str:
    form = "{:<20}{:>15}{:>17}{:>7}{:>12}  {}"
    heads = ("event", "s to new step", "s without step", "ranks", "steps lost", "repeated alike")
    lines = [form.format(*heads)]
    for cost in costs:
        seconds = f"{cost.seconds:.2f}", f"{cost.pause:.2f}"
        lines.append(form.format(cost.event, *seconds, cost.ranks, cost.lost, words(cost)))
    return "\n".join(lines)


def words(cost: Cost) -> str:
    """Whether the losses of repeated steps are, bit for bit, those that were lost."""
    if not cost.repeated:
        return "none repeated"
    return "yes" if cost.equal else "NO"


def check(settings: DemoSettings) -> None:
    """Raises: UserError for acts that there are not."""
    for act in settings.acts:
        if act not in ACTS:
            raise UserError(f"--acts: there is no act {act!r}; there are {', '.join(ACTS)}")


def differences(out: Path, record: Record, training: list[str]) -> int:
    """How many losses are others in a training on one rank that nothing happens to."""
    say("the same without any event, on one rank")
    known = losses(record.refresh())
    calm = out / "undisturbed"
    shutil.rmtree(calm, ignore_errors=True)
    steps = max(step for step, _ in known)
    more = [f"--out_dir={calm}", f"--max_steps={steps}", "--replicas=0"]
    launcher = [sys.executable, "-m", "libddp", "run", "--standalone", "--nproc-per-node=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, *training, *more], env=environment, check=True)
    return len(losses(Record(calm).refresh()).items() ^ known.items())


def clean(out: Path) -> None:
    """What a demo before this one has left."""
    shutil.rmtree(out / "snapshots", ignore_errors=True)
    for name in (STEPS, "stop", "demo.json", "loss.png", "host-0.txt", "host-1.txt"):
        (out / name).unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    settings = parse(DemoSettings, arguments)
    check(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # hosts are removed
    out = Path(settings.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    clean(out)
    training = [str(SCRIPT), f"--out_dir={out}", "--max_steps=1000000000", "--replicas=1"]
    training += [f"--snapshot_every={settings.snapshot_every}"]
    training += [f"--{each}" for each in settings.train]
    record, began = Record(out), time.monotonic()
    with Hosts(2, out, LAUNCH, training) as hosts:
        demo = Demo(settings, hosts, record)
        demo.run()
    seconds, costs = time.monotonic() - began, demo.costs
    steps = max(line.step for line in record.refresh())
    result = {"seconds": seconds, "steps": steps, "left_out": demo.left_out}
    result["events"] = [asdict(cost) | {"at": cost.at - began} for cost in costs]
    result["different_from_undisturbed"] = None
    if settings.compare:
        result["different_from_undisturbed"] = differences(out, record, training)
        say(f"losses that are others: {result['different_from_undisturbed']} of {2 * steps}")
    (out / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(record.lines, costs, began, out / "loss.png")
    print(table(costs))
    if demo.left_out:
        say(demo.left_out)
    say(f"{steps} steps in {seconds:.0f} s; {out}/loss.png, {out}/demo.json")
    is_equal = all(cost.equal for cost in costs) and not result["different_from_undisturbed"]
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(run_script(main, "demo.py"))

"""Hosts that can die, on one machine: network namespaces joined by a bridge, one launcher in each.

    with Hosts(2, out, ["--preload"], ["train.py"]) as hosts:
        hosts.start(0)                        # libddp run, in the namespace
        hosts.start(1)
        hosts.pull_the_plug(1)                # as a power failure: cable and processes at once

Namespaces need root. Without, hosts are names (LIBDDP_HOST_ID), all at 127.0.0.1: they can come and
leave, but a power failure cannot be had. Behind the block nothing is left of them.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TOOL_SECONDS = 30


def ip(*arguments: str) -> str:
    """Raises OSError with what ip says."""
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hosts:
    """Thread rule: one thread.

    Args:
        num_hosts: the first one has the launchers' store, so that it must live.
        out: folder for what launchers print, and for the run key.
        flags: of `libddp run`, but for what says where hosts meet.
        script: training script and its arguments.
    """

    def __init__(self, num_hosts: int, out: Path, flags: list[str], script: list[str]):
        self.out, self.flags, self.script = out, flags, script
        self.launchers: dict[int, subprocess.Popen] = {}
        run = secrets.token_hex(3)
        self.run, self.switch = run, f"el{run}s"
        self.names = [f"el{run}h{host}" for host in range(num_hosts)]
        self.addresses = [f"10.78.0.{host + 1}" for host in range(num_hosts)]
        self.port = 29400  # in a namespace all ports are free
        #: Why there are no namespaces; empty where there are.
        self.missing = ""
        self.key = out / "run.key"

    def __enter__(self) -> "Hosts":
        self.key.unlink(missing_ok=True)
        self.key.touch(mode=0o600)
        self.key.write_text(secrets.token_hex(32))
        try:
            self._lay_cables()
        except (OSError, subprocess.SubprocessError) as error:
            self.missing = str(error)
            self.addresses, self.port = ["127.0.0.1"] * len(self.names), free_port()
            self._remove_namespaces()
        return self

    def __exit__(self, *_) -> None:
        for host in list(self.launchers):
            self._end(host)
        if not self.missing:
            for name in self.names:
                self._kill_all(name)
        self._remove_namespaces()
        self.key.unlink(missing_ok=True)

    def _lay_cables(self) -> None:
        for name in (self.switch, *self.names):
            ip("netns", "add", name)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            port = f"port{number}"
            ends = ["type", "veth", "peer", "eth0", "netns", name]
            ip("-n", self.switch, "link", "add", port, *ends)
            ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{self.addresses[number]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def _remove_namespaces(self) -> None:
        for name in (*self.names, self.switch):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                ip("netns", "del", name)

    def start(self, host: int, *more: str) -> None:
        """Starts the host's launcher; `more` are further flags of it."""
        # Whoever comes later is another event: the first start waits for nobody.
        conf = f"is_host={int(host == 0)},last_call_timeout=1"
        place = [
            *("--rdzv-backend=c10d", f"--rdzv-id={self.run}", f"--rdzv-conf={conf}"),
            f"--rdzv-endpoint={self.addresses[0]}:{self.port}",
            f"--local-addr={self.addresses[host]}",
            f"--run-key-file={self.key}",
        ]
        inside = [] if self.missing else ["ip", "netns", "exec", self.names[host]]
        launcher = [sys.executable, "-m", "libddp", "run", *place, *self.flags, *more]
        with open(self.out / f"host-{host}.txt", "ab") as output:
            self.launchers[host] = subprocess.Popen(
                [*inside, *launcher, *self.script],
                env=os.environ | {"OMP_NUM_THREADS": "1", "LIBDDP_HOST_ID": self.names[host]},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill_launcher(self, host: int) -> None:
        """SIGKILL; its workers go with it, by themselves."""
        launcher = self.launchers.pop(host)
        launcher.kill()
        launcher.wait()

    def leave(self, host: int, seconds: float) -> int:
        """SIGTERM to the launcher, which ends its workers; returns its exit status."""
        launcher = self.launchers.pop(host)
        launcher.terminate()
        return launcher.wait(seconds)

    def pull_the_plug(self, host: int) -> None:
        """The network first, so that nobody is told of the deaths that follow."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")
        self._kill_all(self.names[host])
        self.launchers.pop(host).wait(TOOL_SECONDS)

    def repair(self, host: int) -> None:
        """The cable is in its place again."""
        ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def said(self, host: int) -> str:
        path = self.out / f"host-{host}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def _kill_all(self, name: str) -> None:
        """All that runs in a namespace, the keeper too."""
        with contextlib.suppress(OSError):
            for pid in ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def _end(self, host: int) -> None:
        launcher = self.launchers.pop(host)
        launcher.terminate()
        limit = time.monotonic() + TOOL_SECONDS
        while launcher.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        launcher.kill()
        launcher.wait()

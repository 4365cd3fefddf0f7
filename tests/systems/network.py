"""Several hosts on one machine: network namespaces joined by a bridge.

    with Network(2) as net:                       # needs root
        subprocess.Popen([*net.inside(1), "python", "train.py"])
        net.addresses                             # ["10.77.0.1", "10.77.0.2"]

Names are random, so runs do not meet; everything is gone after the block, whatever happened in it.
Processes inside must have ended before.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
from pathlib import Path


def run_tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def ip(*arguments: str) -> None:
    run_tool("ip", *arguments)


def why_not() -> str | None:
    """Why networks cannot be made here; None if they can."""
    try:
        with Network(1):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


class Network:
    def __init__(self, num_hosts: int, *, ipv6: bool = False):
        prefix = "fd77::" if ipv6 else "10.77.0."
        self.bits = 64 if ipv6 else 24
        self.addresses = [f"{prefix}{host + 1}" for host in range(num_hosts)]
        run = secrets.token_hex(4)
        self.switch = f"ddp{run}s"
        self.hosts = [f"ddp{run}h{host}" for host in range(num_hosts)]

    def __enter__(self) -> Network:
        try:
            for name in (self.switch, *self.hosts):
                ip("netns", "add", name)
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for number, host in enumerate(self.hosts):
                self.plug(number, host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def plug(self, number: int, host: str) -> None:
        """One cable from the host's eth0 to the switch."""
        port = f"port{number}"
        ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", host)
        ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
        # nodad: an IPv6 address is usable at once.
        nodad = ["nodad"] if ":" in self.addresses[number] else []
        address = f"{self.addresses[number]}/{self.bits}"
        ip("-n", host, "addr", "add", address, "dev", "eth0", *nodad)
        ip("-n", host, "link", "set", "eth0", "up")
        ip("-n", host, "link", "set", "lo", "up")

    def inside(self, host: int) -> list[str]:
        """The beginning of a command that runs on this host."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def add_lonely_interface(self, host: int, name: str, address: str) -> None:
        """One that is up and leads nowhere."""
        end = f"{name}-end"
        ip("-n", self.hosts[host], "link", "add", name, "type", "veth", "peer", "name", end)
        ip("-n", self.hosts[host], "addr", "add", address, "dev", name)
        for interface in (name, end):
            ip("-n", self.hosts[host], "link", "set", interface, "up")

    def cap(self, rate: str) -> None:
        """Each host sends at most so much, in tc's words: "1gbit". Ethernet's headers count."""
        for host in self.hosts:
            tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            run_tool("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", *tbf)

    def cut(self, host: int) -> None:
        """Pulls the host's cable."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Puts the host's cable back."""
        ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def lose(self, source: int, target: int) -> None:
        """From now on what `source` sends to `target` is lost; the other direction is not."""
        ip("-n", self.hosts[source], "neigh", "replace", self.addresses[target], "lladdr",
           "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")  # fmt: skip

    def find(self, source: int, target: int) -> None:
        """Takes `lose` back."""
        ip("-n", self.hosts[source], "neigh", "del", self.addresses[target], "dev", "eth0")

    @contextlib.contextmanager
    def dead_name_server(self, host: int):
        """The host's only name server is one whose answers never come."""
        name, server = self.hosts[host], self.addresses[host].rpartition(".")[0] + ".99"
        ip("-n", name, "neigh", "replace", server, "lladdr", "02:00:00:00:00:99",
           "dev", "eth0", "nud", "permanent")  # fmt: skip
        folder = Path("/etc/netns") / name  # what `ip netns exec` shows as /etc
        folder.mkdir(parents=True)
        try:
            (folder / "resolv.conf").write_text(f"nameserver {server}\n")
            yield
        finally:
            shutil.rmtree(folder)

    def __exit__(self, *_) -> None:
        for name in (*self.hosts, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)

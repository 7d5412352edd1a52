"""Two hosts on one machine, joined by a cable, out of Linux namespaces.

    with two_hosts(rate="100mbit") as (one, two):
        launch.start("./train_multigpu.sh", "1", "har", ..., host=one)

Each has a network, process ids, a name and a table of names of its own, so that what runs there takes the other for
another machine; files and cores they share. Nothing of it has a name outside, and it ends with this process, however
that ends: any number of tests may do this at once. Skips the test where it is not possible: it takes Linux, iproute2,
util-linux, and root or the right to make user namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

CABLE = "cable"
"""The network interface by which each of them reaches the other."""

HOLD = "import socket, sys; socket.sethostname(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
"""Process 1 of a host: the host goes down with it, and it with whoever holds the other end of its input."""


class Host:
    """
    name, address  as the other one knows it
    enter          the words before a command that let it run there, in this folder
    namespaces     what they enter
    """

    def __init__(self, name: str, address: str, user: list[str]):
        self.name, self.address = name, address
        apart = "unshare --net --uts --mount --pid --mount-proc --fork --kill-child".split()
        self.holder = subprocess.Popen(
            [*user, *apart, sys.executable, "-c", HOLD, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.holder.stdout and self.holder.stderr
        if self.holder.stdout.readline() != "up\n":
            pytest.skip(f"this machine lets nobody make network namespaces: {self.holder.stderr.read().strip()}")
        spaces = f"/proc/{self.holder.pid}/ns"
        as_user = [f"--user={spaces}/user", "--preserve-credentials"] if os.geteuid() else []
        self.inside_user = ["nsenter", *as_user]
        self.inside_network = [*self.inside_user, f"--net={spaces}/net"]
        everything = [f"--uts={spaces}/uts", f"--mount={spaces}/mnt", f"--pid={spaces}/pid_for_children"]
        first = ["user"] if as_user else []
        self.namespaces = [f"{spaces}/{each}" for each in (*first, "net", "uts", "mnt", "pid_for_children")]
        self.enter = [*self.inside_network, *everything, "env", f"--chdir={Path.cwd()}"]

    def run(self, *command: str) -> str:
        """Return the output of a command that must succeed."""
        return checked([*self.enter, *command])

    def kill_all(self) -> None:
        """SIGKILL to every process on it, at once: their connections are reset."""
        subprocess.run([*self.enter, "sh", "-c", "kill -KILL -1"], check=True)

    def unplug(self) -> None:
        """The cable: from now on the other one hears nothing, not even that a connection has ended."""
        self.run("ip", "link", "set", CABLE, "down")

    def end(self) -> None:
        self.holder.communicate()  # returns when the kernel has ended all that ran there


def checked(command: list[str]) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextmanager
def two_hosts(rate: str | None = None) -> Iterator[tuple[Host, Host]]:
    """
    rate  of the cable in each direction as tc writes it, such as 100mbit or 1gbit; None: as fast as memory is
    """
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed: apt-get install iproute2 util-linux")
    with ExitStack() as ending:
        tables = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="hosts_")))
        one = Host("one", "10.93.0.1", ["unshare", "--user", "--map-root-user"] if os.geteuid() else [])
        ending.callback(one.end)
        two = Host("two", "10.93.0.2", one.inside_user if os.geteuid() else [])
        ending.callback(two.end)
        peer = [CABLE, "netns", str(two.holder.pid)]
        checked([*one.inside_network, "ip", "link", "add", CABLE, "type", "veth", "peer", *peer])
        for host, other in ((one, two), (two, one)):
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
            host.run("ip", "link", "set", CABLE, "up")
            # As Debian's installer writes it: a host's own name is no address for the others.
            table = tables / host.name
            table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n")
            host.run("mount", "--bind", str(table), "/etc/hosts")
            if rate:
                # A burst goes through at once, so a small one; what finds no room is sent again late, so a long queue.
                shape = f"tc qdisc add dev {CABLE} root tbf rate {rate} burst 8kb limit 16mb"
                host.run(*shape.split())
        yield one, two
